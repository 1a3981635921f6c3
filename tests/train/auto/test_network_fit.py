"""Network fit: planted lines come out again, whoever is slow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.train.auto.measurement import Measurement, StepSeconds
from gossamer.train.auto.network_fit import Equation, FittedLine, fit, line_of, observe, waited_least

BYTES, TRIPS = 1e6, 2.0
rates, trips = st.floats(1e-9, 1e-6), st.floats(0.0, 0.1)


def equation(line: FittedLine, sent: float = BYTES, count: float = TRIPS, rung: str = "a") -> Equation:
    wire = line.wire_seconds(sent, count)
    return Equation(rung=rung, bytes_sent=sent, trips=count, wire=wire, waited_for=True)


def told(*ranks: tuple[float, float, float], steps: int = 4, **more: float) -> list[Measurement]:
    """(computing, waiting, wire) of each rank in every step."""
    return [
        Measurement(steps=[StepSeconds(computing + waiting, waiting, wire, 0.01)] * steps, bytes_sent=BYTES, **more)
        for computing, waiting, wire in ranks
    ]


@given(rates, trips)
def test_with_the_latency_of_a_look_the_line_is_found(seconds_per_byte: float, trip_seconds: float) -> None:
    line = FittedLine(seconds_per_byte=seconds_per_byte, trip_seconds=trip_seconds)
    now = equation(line)
    looks = [Measurement(exchange_seconds=2 * trip_seconds + late) for late in (0.0, 5.0)]
    found, _ = fit(now, looks, None, None)
    assert found.wire_seconds(BYTES, TRIPS) == pytest.approx(now.wire)
    if BYTES * seconds_per_byte > 0.2 * now.wire:  # else the latency is cut off, since bytes take time, too
        assert found.trip_seconds == pytest.approx(trip_seconds)
        assert found.seconds_per_byte == pytest.approx(seconds_per_byte)


@given(rates, trips)
def test_two_rungs_tell_what_one_cannot(seconds_per_byte: float, trip_seconds: float) -> None:
    line = FittedLine(seconds_per_byte=seconds_per_byte, trip_seconds=trip_seconds)
    before, now = equation(line), equation(line, sent=BYTES / 20, count=TRIPS + 1, rung="b")
    found, _ = fit(now, [], before, None)
    alone, _ = fit(now, [], None, None)
    assert alone.trip_seconds == 0.0
    if BYTES / 20 * seconds_per_byte > 0.2 * now.wire:
        assert found.trip_seconds == pytest.approx(trip_seconds, abs=1e-9)
        assert found.seconds_per_byte == pytest.approx(seconds_per_byte, rel=1e-3)


def test_what_a_rung_takes_next_to_its_price_is_its_own() -> None:
    """The line is told by the rung that sends more, whichever came first; the other has a factor."""
    line = FittedLine(seconds_per_byte=1e-7, trip_seconds=0.01)
    looks = [Measurement(exchange_seconds=0.02)]
    many, few = equation(line), equation(line, sent=BYTES / 10, count=TRIPS, rung="b")
    odd = replace(few, wire=0.5 * few.wire)
    for before, now in ((many, odd), (odd, many)):
        found, factors = fit(now, looks, before, line)
        assert found.seconds_per_byte == pytest.approx(line.seconds_per_byte)
        assert factors == {"a": 1.0, "b": pytest.approx(0.5)}
    twin, _ = fit(odd, looks, None, line)
    assert twin.seconds_per_byte < 0.6 * line.seconds_per_byte


def test_a_line_that_changed_in_between_teaches_no_factor() -> None:
    line = FittedLine(seconds_per_byte=1e-7, trip_seconds=0.01)
    slower = FittedLine(seconds_per_byte=1e-6, trip_seconds=0.01)
    now = equation(slower, sent=BYTES / 2, rung="b")
    found, factors = fit(now, [Measurement(exchange_seconds=0.02)], equation(line), line)
    assert factors.get("b", 1.0) == 1.0
    assert found.seconds_per_byte == pytest.approx(slower.seconds_per_byte)


def test_what_is_hidden_teaches_no_latency() -> None:
    line = FittedLine(seconds_per_byte=1e-7, trip_seconds=0.01)
    hidden = Equation(rung="b", bytes_sent=BYTES / 20, trips=3.0, wire=1.0, waited_for=False)
    assert fit(hidden, [], equation(line), None)[0].trip_seconds == 0.0


def test_a_faster_line_forgets_its_latency() -> None:
    known = FittedLine(seconds_per_byte=1e-7, trip_seconds=0.5)
    found, _ = fit(equation(FittedLine(seconds_per_byte=1e-9, trip_seconds=0.001)), [], None, known)
    assert found.trip_seconds < 0.002


def test_a_wire_that_takes_no_time_is_a_fast_one() -> None:
    nothing = Equation(rung="a", bytes_sent=0.0, trips=0.0, wire=0.0, waited_for=False)
    assert line_of(nothing, 1.0).bits_per_second >= 1e12


@given(st.floats(0.0, 10.0), st.integers(0, 3))
def test_a_straggler_moves_neither_wire_nor_waiting(late: float, rank: int) -> None:
    """The others wait for it, on the wire; the twin believes those who waited most."""
    ranks = [(0.1, 0.05 + late, 0.05 + late)] * 4
    ranks[rank] = (0.1 + late, 0.05, 0.05)
    window = observe(told(*ranks), 1)
    twin = observe(told(*ranks), 1, believed=lambda each: max(each, key=lambda one: one.waiting))
    assert window is not None
    assert twin is not None
    assert window.wire == pytest.approx(0.05)
    assert window.waiting == pytest.approx(0.05)
    assert window.computing == pytest.approx(0.1 + late)
    assert twin.wire == pytest.approx(0.05 + late)


def test_stragglers_that_take_turns_move_nothing_either() -> None:
    ranks = [
        Measurement(
            steps=[StepSeconds(1.0, *((0.1, 0.1) if step % 3 == rank else (0.8, 0.8)), 0.0) for step in range(9)],
            bytes_sent=BYTES,
        )
        for rank in range(3)
    ]
    window = observe(ranks, 1)
    assert window is not None
    assert window.wire == pytest.approx(0.1)


def test_a_period_counts_as_a_whole_wherever_its_round_lies() -> None:
    """One step of four has a round; windows may begin anywhere."""
    for begin in range(4):
        steps = [
            StepSeconds(0.1 + 0.4 * (step % 4 == begin), *[0.4 * (step % 4 == begin)] * 2, 0.0) for step in range(11)
        ]
        window = observe([Measurement(steps=steps, bytes_sent=1.0)] * 2, 4)
        assert window is not None
        assert window.wire == pytest.approx(0.1)
        assert window.step == pytest.approx(0.2)
    assert observe([Measurement(steps=steps[:3])] * 2, 4) is None


def test_ranks_without_data_are_not_asked() -> None:
    window = observe([*told((0.1, 0.2, 0.2)), Measurement()], 1)
    assert window is not None
    assert window.wire == pytest.approx(0.2)
    assert observe([Measurement()], 1) is None


def test_ranks_may_have_told_of_other_numbers_of_steps() -> None:
    long, short = told((0.1, 0.2, 0.2), steps=9), told((0.1, 0.3, 0.3), steps=2)
    window = observe([*long, *short], 1)
    assert window is not None
    assert window.wire == pytest.approx(0.2)
    assert waited_least([long[0].steps[0], short[0].steps[0]]).wire == 0.2
