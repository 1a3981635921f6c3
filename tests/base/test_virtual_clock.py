from hypothesis import given
from hypothesis import strategies as st

from gossamer.base.virtual_clock import VirtualClock


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2))))
def test_callbacks_run_by_moment_then_turn_then_order(queued):
    clock, ran = VirtualClock(), []
    for number, (moment, turn) in enumerate(queued):
        clock.at(float(moment), ran.append, (moment, turn, number), turn=turn)
    clock.run()
    assert ran == sorted((moment, turn, number) for number, (moment, turn) in enumerate(queued))


def test_a_callback_sees_its_own_moment_and_may_queue_others():
    clock, seen = VirtualClock(), []

    def tick(left):
        seen.append(clock.now)
        if left:
            clock.after(0.5, tick, left - 1)

    clock.at(1.0, tick, 2)
    clock.run()
    assert seen == [1.0, 1.5, 2.0]


def test_run_until_a_moment_keeps_later_callbacks():
    clock, ran = VirtualClock(), []
    for moment in (1.0, 2.0, 3.0):
        clock.at(moment, ran.append, moment)
    clock.run(until=2.0)
    assert (ran, clock.now) == ([1.0, 2.0], 2.0)
    clock.run(until=2.5)
    assert (ran, clock.now) == ([1.0, 2.0], 2.5)
    assert clock.run_next()
    assert not clock.run_next()
    assert (ran, clock.now) == ([1.0, 2.0, 3.0], 3.0)
