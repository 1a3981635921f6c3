from __future__ import annotations

import pytest

from gossamer.plan.doctor.link_statistics import (
    Ping,
    bits_per_second,
    clock_offset_seconds,
    direction_seconds,
    largest_that_fits,
    pairs,
    round_trip_seconds,
)

# The other's clock is 5 s ahead; the second ping was kept waiting for 60 ms on its way back.
PINGS = [Ping(100.00, 105.01, 100.02, 0.02), Ping(101.00, 106.01, 101.08, 0.08), Ping(102.0, 107.015, 102.03, 0.03)]


def test_round_trips() -> None:
    assert round_trip_seconds(PINGS) == (0.02, 0.03)


def test_the_clock_is_read_from_the_shortest_round_trip() -> None:
    assert clock_offset_seconds(PINGS) == pytest.approx(5.0, abs=1e-9)
    assert clock_offset_seconds(PINGS[1:2]) == pytest.approx(4.97, abs=1e-9)  # half of what it waited is mistaken
    behind = [Ping(100.00, 97.01, 100.02, 0.02)]
    assert clock_offset_seconds(behind) == pytest.approx(-3.0, abs=1e-9)


def test_a_burst_at_the_beginning_is_not_the_rate() -> None:
    # 250 kB at once, then 1 MB a second
    arrivals = [(0.0, 0), (0.001, 250_000), (0.251, 500_000), (0.501, 750_000), (0.751, 1_000_000)]
    assert bits_per_second(arrivals) == pytest.approx(8e6)
    naive = 8 * arrivals[-1][1] / arrivals[-1][0]
    assert naive > 1.3 * 8e6


@pytest.mark.parametrize("arrivals", [[(5.0, 0), (5.5, 1000)], [(5.0, 0), (5.5, 900), (5.5, 1000)]])
def test_what_comes_in_one_piece_has_a_rate_too(arrivals: list[tuple[float, int]]) -> None:
    assert bits_per_second(arrivals) == 16_000


class Line:
    """Carries so many bytes a second, by a clock of its own, and its n-th message at slowed[n] of that."""

    def __init__(self, bytes_per_second: float, slowed: dict[int, float] | None = None) -> None:
        self.seconds, self.sizes = 0.0, list[int]()
        self._bytes_per_second, self._slowed = bytes_per_second, slowed or {}

    def transfer(self, nbytes: int) -> float:
        rate = self._bytes_per_second * self._slowed.get(len(self.sizes), 1.0)
        self.sizes.append(nbytes)
        self.seconds += nbytes / rate
        return 8 * rate

    def clock(self) -> float:
        return self.seconds


def test_messages_grow_while_there_is_time() -> None:
    line = Line(1e6)
    assert largest_that_fits(line.transfer, 1.0, line.clock) == 8e6
    assert line.sizes == [16384, 32768, 65536, 131072, 262144]
    assert 0.5 < line.seconds <= 1.0


def test_a_message_that_was_disturbed_is_sent_again() -> None:
    disturbed = Line(1e6, {4: 0.8})
    assert largest_that_fits(disturbed.transfer, 1.0, disturbed.clock) == 8e6
    assert disturbed.sizes[4:] == [262144, 262144]
    one_of_three = Line(1e6, {3: 0.8, 4: 0.9, 5: 0.7, 6: 0.6, 8: 0.5})
    assert largest_that_fits(one_of_three.transfer, 1.0, one_of_three.clock) == 8e6
    assert one_of_three.sizes[4:] == [262144] * 6
    growing = Line(1e6, {0: 0.2, 1: 0.3, 2: 0.5, 3: 0.8})
    assert largest_that_fits(growing.transfer, 1.0, growing.clock) == 8e6
    always = Line(1e6, {3: 0.7} | {n: 0.95**n for n in range(4, 20)})
    assert largest_that_fits(always.transfer, 1.0, always.clock) < 8e6
    assert len(always.sizes) == 4 + 1 + 6


@pytest.mark.parametrize("bytes_per_second", [1e3, 1e4, 1e5, 1e7, 1e9])
def test_time_is_bounded(bytes_per_second: float) -> None:
    line = Line(bytes_per_second)
    largest_that_fits(line.transfer, 1.0, line.clock)
    assert line.seconds <= max(1.0, 16384 / bytes_per_second)


def test_every_pair_once() -> None:
    assert pairs(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_seconds_are_shared_down_to_a_least() -> None:
    assert direction_seconds(5, 2) == 2.5
    assert direction_seconds(6, 3) == 1.0
    assert direction_seconds(5, 8) == 0.2
