"""Link statistics: round trip, bandwidth and clock offset from raw timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

FIRST_BYTES = 16 << 10
WARMING_SHARE = 0.25  # of a message's bytes to ignore: bursts of a link, and growing windows
ALIKE = 0.03  # relative difference of two undisturbed rates
MORE_TIMES = 6
LEAST_SECONDS = 0.2  # per direction and pair, for any number of pairs

Arrivals = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Ping:
    """Round trip of one small message. Times are seconds since the epoch."""

    sent: float
    answered: float  # by the other's clock
    received: float
    seconds: float  # the round trip, by a monotonic clock


def round_trip_seconds(pings: Sequence[Ping]) -> tuple[float, float]:
    """The minimum and the median round trip in seconds."""
    return min(ping.seconds for ping in pings), median(ping.seconds for ping in pings)


def clock_offset_seconds(pings: Sequence[Ping]) -> float:
    """Clock offset of the other end, as in NTP: from the shortest round trip, with the least asymmetry.

    offset = answered - (sent + received) / 2, with an error of at most half the round trip
    """
    best = min(pings, key=lambda ping: ping.seconds)
    return best.answered - (best.sent + best.received) / 2


def bits_per_second(arrivals: Arrivals) -> float:
    """The rate at which a message arrived, without its first quarter.

    arrivals: (seconds, bytes so far), from (start, 0) to the last.
    """
    start, (end_seconds, end_bytes) = arrivals[0], arrivals[-1]
    warm = next((each for each in arrivals if each[1] >= WARMING_SHARE * end_bytes), start)
    from_seconds, from_bytes = warm if warm[0] < end_seconds else start
    return 8 * (end_bytes - from_bytes) / (end_seconds - from_seconds)


def largest_that_fits(
    transfer: Callable[[int], float], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Rate transfer(bytes) of the largest message that fits into `seconds`; messages double until none would fit.

    Other work and growing windows only slow a message. So if the two highest rates among the largest messages and the
    one before them agree, they are undisturbed. Otherwise the largest one is sent again, at most MORE_TIMES. The
    highest rate counts.
    """
    end = clock() + seconds
    nbytes, before = FIRST_BYTES, 0.0
    while True:
        began = clock()
        rate = transfer(nbytes)
        now = clock()
        if now + 2 * (now - began) > end:
            break
        nbytes, before = 2 * nbytes, rate
    rates = sorted((before, rate))
    for _ in range(MORE_TIMES if before else 0):
        if rates[-1] - rates[-2] <= ALIKE * rates[-1]:
            break
        rates = sorted((*rates, transfer(nbytes)))
    return rates[-1]


def pairs(world: int) -> list[tuple[int, int]]:
    """All pairs of ranks in order of measurement."""
    return list(combinations(range(world), 2))


def direction_seconds(seconds: float, world: int) -> float:
    """Sending time of each direction of each pair, for a total of `seconds`."""
    return max(seconds / (2 * len(pairs(world))), LEAST_SECONDS)
