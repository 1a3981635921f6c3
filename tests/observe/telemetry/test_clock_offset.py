"""Clock offsets in virtual time: clocks that are set apart and drift, ways that take unequally long."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gossamer.observe.telemetry.clock_offset import MOST_DRIFT, ClockOffset, Offset

SKEW = 3.7  # seconds between the clocks at the beginning
Delays = Callable[[random.Random], tuple[float, float]]  # there and back, in seconds


def symmetric(draws: random.Random) -> tuple[float, float]:
    return 0.010, 0.010


def jittered(draws: random.Random) -> tuple[float, float]:
    return 0.010 + draws.expovariate(1 / 0.002), 0.010 + draws.expovariate(1 / 0.002)


def one_way_slower(draws: random.Random) -> tuple[float, float]:
    return 0.004, 0.016


def follow(drift: float, delays: Delays, seconds: int = 1800) -> list[tuple[Offset, float]]:
    """Offsets asked for now and then, each with the true one. True time is that of this machine's clock."""
    draws, clocks, found = random.Random(3), ClockOffset(), []

    def other(moment: float) -> float:
        return moment + SKEW + drift * moment

    for second in range(0, seconds, 5):
        there, back = delays(draws)
        sent = second + draws.random()
        clocks.add(sent, other(sent + there), sent + there + back)
        asked = sent + there + back + draws.random() * 4
        offset = clocks.at(asked)
        assert offset is not None
        found.append((offset, other(asked) - asked))
    return found


@pytest.mark.parametrize("drift", [0.0, 5e-5, -2e-4])
def test_equal_ways_of_twenty_milliseconds_are_right_within_one(drift: float) -> None:
    found = follow(drift, symmetric)
    assert max(abs(offset.seconds - true) for offset, true in found) < 0.001
    assert max(offset.error for offset, _ in found) < 0.013


@pytest.mark.parametrize("delays", [symmetric, jittered, one_way_slower])
@pytest.mark.parametrize("drift", [0.0, 5e-5, -2e-4])
def test_the_bound_holds_whatever_the_ways_take(drift: float, delays: Delays) -> None:
    for offset, true in follow(drift, delays):
        assert abs(offset.seconds - true) <= offset.error


def test_jitter_is_outlived_by_the_shortest_round_trips() -> None:
    late = follow(5e-5, jittered)[60:]
    assert max(abs(offset.seconds - true) for offset, true in late) < 0.001


def test_a_twin_that_takes_the_newest_trip_would_be_worse() -> None:
    draws = random.Random(3)
    newest = [abs(there - back) / 2 for there, back in (jittered(draws) for _ in range(300))]
    assert max(newest) > 0.003


def test_nothing_is_known_before_the_first_trip_and_age_makes_it_worse() -> None:
    clocks = ClockOffset()
    assert clocks.at(0.0) is None
    clocks.add(10.0, 15.01, 10.02)
    assert clocks.at(10.01) == pytest.approx((5.0, 0.01))
    later = clocks.at(110.01)
    assert later is not None
    assert later.error == pytest.approx(0.01 + 100 * MOST_DRIFT)


def test_a_clock_that_is_set_begins_anew() -> None:
    clocks = ClockOffset()
    clocks.add(1000.0, 1000.01, 1000.02)
    clocks.add(500.0, 1005.01, 500.02)
    assert clocks.at(500.01) == pytest.approx((505.0, 0.01))


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 300.0, -300.0, 1.0])
@pytest.mark.parametrize("whose", ["this", "other"])
def test_a_clock_that_is_set_is_followed_at_the_next_round_trip(jump: float, whose: str) -> None:
    """The broken twin remembers the trips of before, the shortest of which it goes on to believe."""
    clocks, true = ClockOffset(), SKEW
    mine = 1e6
    for trip in range(20):
        if trip == 10:
            mine, true = (mine + jump, true - jump) if whose == "this" else (mine, true + jump)
        seconds = 0.010 if trip < 10 else 0.020  # those of before look better
        clocks.add(mine, mine + seconds / 2 + true, mine + seconds)
        offset = clocks.at(mine + seconds)
        assert offset is not None
        assert abs(offset.seconds - true) <= offset.error < 0.1
        mine += 5.0
