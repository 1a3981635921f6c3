from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.base.ops import AllGather
from gossamer.comm.network.cost.step_simulator import (
    BACKWARD_SHARE,
    BucketJob,
    RankWork,
    Trip,
    even_wait,
    ready_seconds,
    run_sites,
    run_step,
    run_turns,
)

WORD = AllGather((torch.empty(1, device="meta"),))


@dataclass(frozen=True)
class Measured:
    """What a worker does in a step."""

    backward_seconds: float = 20.0
    rest_seconds: float = 4.0
    buffer_bytes: tuple[int, ...] = ()
    crowded: bool = False


measured = Measured


class Fixed:
    """Every op takes ten seconds after the last rank has said it, every broadcast one."""

    def answer(self, ops, starts):
        return [max(starts) + 10.0] * len(starts)

    def broadcast(self, nbytes, starts):
        return [max(starts) + 1.0] * len(starts)


def job(ready, *rounds, last=0.0):
    return BucketJob(ready_seconds=ready, rounds=[(seconds, WORD, 0.0) for seconds in rounds], last_seconds=last)


@pytest.mark.parametrize(
    ("jobs", "end", "waiting", "wire", "codec"),
    [
        ([], 24.0, 0.0, 0.0, 0.0),
        ([job(5.0, 1.0)], 24.0, 0.0, 10.0, 1.0),  # hidden: 5 + 1 + 10 < 20
        ([job(20.0, 1.0, last=2.0)], 37.0, 13.0, 10.0, 3.0),  # all after backward
        ([job(5.0, 1.0), job(6.0, 1.0)], 24.0, 0.0, 10.0, 2.0),  # the second leaves at 7, while the first travels
        ([job(2.0, 1.0), job(18.0, 1.0)], 33.0, 9.0, 10.0, 2.0),  # nobody waits for the first, there since 13
        ([job(20.0, 1.0, 3.0, last=2.0)], 50.0, 26.0, 20.0, 6.0),  # two rounds
        ([job(20.0, 1.0, 3.0, last=2.0)] * 2, 53.0, 29.0, 17.0, 12.0),  # of two: 9 s and 7 s for one, 1 s for the other
        ([job(2.0, 1.0, 1.0), job(18.0, 1.0)], 34.0, 10.0, 10.0, 3.0),  # the second op waits for its turn at 19
    ],
)
def test_the_lane_is_a_queue(jobs, end, waiting, wire, codec):
    step = run_step(jobs, measured(), Fixed(), [0.0, 0.0])
    assert (step.ends, step.waiting) == ([end] * 2, [waiting] * 2)
    assert (step.wire, step.codec) == ([wire] * 2, [codec] * 2)


def test_steps_begin_where_the_last_one_ended():
    step = run_step([job(20.0, 0.0)], measured(), Fixed(), [100.0, 103.0])
    assert step.ends == [137.0, 137.0]
    assert step.waiting == [13.0, 10.0]


def test_on_crowded_processors_the_codec_and_backward_take_turns():
    """At 10 both want the core: the codec's 4 seconds take 8, and backward's last 10 take 14."""
    step = run_step([job(10.0, 4.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [28.0 + 4.0]
    alone = run_step([job(10.0, 4.0)], measured(), Fixed(), [0.0])
    assert alone.ends == [24.0 + 4.0]


def test_after_backward_there_is_nothing_to_share():
    work = [job(20.0, 4.0)]
    assert run_step(work, measured(crowded=True), Fixed(), [0.0]) == run_step(work, measured(), Fixed(), [0.0])


def test_what_is_delayed_is_ready_later():
    step = run_step([job(1.0, 4.0), job(15.0, 0.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [29.0 + 4.0]  # the second is ready at 15 + 4, when the communication thread just became free
    assert step.codec == [8.0]


def test_buffers_follow_the_last_bucket():
    step = run_step([job(20.0, 0.0)], measured(buffer_bytes=(8, 8, 8)), Fixed(), [0.0, 0.0])
    assert step.waiting == [13.0, 13.0]
    assert run_step([], measured(buffer_bytes=(8,)), Fixed(), [0.0]).wire == [0.0]


@dataclass
class SerialLine:
    """Every op occupies the line for so many seconds."""

    seconds: float
    free: float = 0.0

    def answer(self, ops, starts):
        self.free = max(self.free, *starts) + self.seconds
        return [self.free] * len(starts)


@given(
    buckets=st.integers(1, 8),
    backward=st.floats(0.01, 10),
    computing=st.floats(0, 5),
    wire=st.floats(0, 50),
)
def test_steps_with_equal_buckets_wait_as_long_as_the_closed_form_says(buckets, backward, computing, wire):
    jobs = [
        BucketJob(ready_seconds=ready_seconds(backward, (place + 1) / buckets), rounds=[(computing, WORD, 0.0)])
        for place in range(buckets)
    ]
    pace = Measured(backward_seconds=backward, rest_seconds=0.0)
    step = run_step(jobs, pace, SerialLine(wire), [0.0], window=1)
    hidden, shares = BACKWARD_SHARE * backward * (buckets - 1) / buckets, [1 / buckets] * buckets
    assert step.waiting == [pytest.approx(even_wait(buckets * (computing + wire), shares, hidden), abs=1e-9)]


@given(entries=st.lists(st.integers(1, 1000), min_size=1, max_size=8), busy=st.floats(0, 50))
@example(entries=[1, 12], busy=1.0)
@example(entries=[1, 25, 25, 7], busy=20.0)
def test_steps_with_unequal_buckets_wait_as_long_as_the_closed_form_says(entries, busy):
    shares = [count / sum(entries) for count in entries]
    jobs = [
        BucketJob(ready_seconds=ready_seconds(1.0, ready), rounds=[(busy * share, WORD, 0.0)])
        for ready, share in zip(accumulate(shares), shares, strict=True)
    ]
    step = run_step(jobs, Measured(backward_seconds=1.0, rest_seconds=0.0), SerialLine(0.0), [0.0], window=1)
    hidden = BACKWARD_SHARE * (1 - shares[0])
    assert step.waiting == [pytest.approx(even_wait(busy, shares, hidden), abs=1e-9)]


# -- sync rounds -------------------------------------------------------------------------------------------------------


def turns(schedule, *trips, world=2, **changes):
    found = run_turns(trips, schedule, measured(**changes), Fixed(), [RankWork()] * world)
    return found.seconds, found.waiting, found.wire, found.codec


def trip(*jobs, offering=0.0, landing=0.0):
    return Trip(jobs=jobs, offering_seconds=offering, landing_seconds=landing)


PASS = 24.0  # seconds; an op takes ten


@pytest.mark.parametrize(
    ("schedule", "ops", "seconds", "waiting"),
    [
        (PeriodicSchedule(5), 1, (5 * PASS + 2 + 11 + 3) / 5, 11 / 5),  # nobody trains meanwhile
        (PeriodicSchedule(5, delay=1), 1, (5 * PASS + 2 + 3) / 5, 0.0),  # 11 < 24: hidden
        (PeriodicSchedule(5, delay=1), 3, (5 * PASS + 2 + 33 + 3 - PASS) / 5, (33 - PASS) / 5),  # 33 > 24
        (PeriodicSchedule(5, delay=2), 3, (5 * PASS + 2 + 3) / 5, 0.0),
        (PeriodicSchedule(1), 1, PASS + 2 + 11 + 3, 11.0),
        (PeriodicSchedule(1, delay=1), 3, 33.0, 33 - PASS - 5),  # the communication thread never rests
        (PeriodicSchedule(1, delay=3), 3, 33.0, 33 - PASS - 5),  # and a longer delay does not help it
        (PeriodicSchedule(1, delay=3), 2, PASS + 5, 0.0),
    ],
)
def test_training_waits_for_what_has_not_landed(schedule, ops, seconds, waiting):
    """2 seconds of offering, 1 of computing before each op, 3 of landing."""
    going = trip(job(0.0, *[1.0] * ops), offering=2.0, landing=3.0)
    on_lane = 10 * ops / schedule.period, ops / schedule.period
    assert turns(schedule, going) == pytest.approx((seconds, waiting, *on_lane))


def test_fragments_take_turns_on_one_lane():
    """The long one still occupies the communication thread when the short one leaves: 96 seconds of 42 + 11 in 4."""
    long, short = trip(job(0.0, *[0.5] * 4)), trip(job(0.0, 1.0))
    assert turns(PeriodicSchedule(4, fragments=2, delay=1), long, short)[:2] == pytest.approx(
        ((96 + 42 - 24) / 4, (42 - 24) / 4)
    )
    assert turns(PeriodicSchedule(4, fragments=2, delay=2), long, short)[:2] == pytest.approx((24.0, 0.0))
    assert turns(PeriodicSchedule(2, fragments=2, delay=1), long, short)[:2] == pytest.approx(
        ((48 + 42 - 24) / 2, (42 - 24) / 2)
    )


def test_a_peer_that_comes_is_known_before_anything_else_leaves():
    """The participation poll takes 10 seconds; one bucket leaves at 11, the other at 12, which is there at 22."""
    going = trip(job(0.0, 0.0), job(0.0, 1.0), job(0.0, 1.0))
    assert turns(PeriodicSchedule(2), going) == pytest.approx(((48 + 22) / 2, 22 / 2, 20 / 2, 2 / 2))
    with pytest.raises(AssertionError):
        assert turns(PeriodicSchedule(2), trip(job(0.0), *going.jobs)) == pytest.approx(
            turns(PeriodicSchedule(2), going)
        )


def test_on_crowded_processors_a_turn_slows_training():
    """Computing on the communication thread takes twice as long beside training, which loses as much as it is given."""
    going = trip(job(0.0, 4.0, last=2.0))
    assert turns(PeriodicSchedule(2, delay=1), going, crowded=True) == pytest.approx(((48 + 6) / 2, 0.0, 5.0, 12 / 2))
    assert turns(PeriodicSchedule(2, delay=1), going) == pytest.approx((24.0, 0.0, 5.0, 3.0))
    assert turns(PeriodicSchedule(2), going, crowded=True) == pytest.approx(((48 + 16) / 2, 8.0, 5.0, 3.0))


def test_training_is_slowed_only_until_it_waits():
    """Of the communication thread's 30 seconds 24 are shared and take twice as long; then training waits."""
    going = trip(job(0.0, 30.0))
    (seconds, waiting, _, codec) = turns(PeriodicSchedule(2, delay=1), going, crowded=True)
    assert codec == pytest.approx((24 * 2 + 6) / 2)
    assert waiting == pytest.approx(16 / 2)
    assert seconds == pytest.approx((48 + 24 + 16) / 2)


def test_sites_step_on_their_own_and_wait_for_turns():
    inner, going = [job(20.0, 1.0)], trip(job(0.0, 1.0), offering=2.0, landing=3.0)
    found = run_sites(inner, [going], PeriodicSchedule(6), measured(), Fixed(), Fixed(), [RankWork()] * 4)
    assert found.seconds == pytest.approx((6 * 35 + 2 + 11 + 3) / 6)
    assert found.waiting == pytest.approx((6 * 11 + 11) / 6)
    assert (found.wire, found.codec) == pytest.approx(((6 * 10 + 10) / 6, (6 + 1) / 6))
    found = run_sites(inner, [going], PeriodicSchedule(2), measured(), Fixed(), Fixed(), [RankWork()] * 4)
    assert found.seconds == pytest.approx((2 * 35 + 2 + 11 + 3) / 2)
