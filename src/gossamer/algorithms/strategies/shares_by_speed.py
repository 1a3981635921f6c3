"""Shares by speed: the parts of a step that each worker computes, so that all workers finish at about the same time.

16 passes a step, seconds per pass 1, 1, 1, 5      shares 5 5 5 1; every worker computes for 5 s
equal shares                                       4 4 4 4; three workers wait for 16 of 20 s
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import ceil, floor, isfinite
from statistics import median

from gossamer.errors import require

LEAST_GAIN = 0.05  # of a step's time; for less, shares do not change, so that noise moves no samples
LONGER = 1.05  # largest factor by which rounding up a worker's local steps may lengthen a round
LEAST_CHANGE, STEADY = 0.75, 0.1  # of a worker's local steps: in steps, and as a part of them
MOST_APART = 32.0  # a reported time counts as at most this many times the median, or at least as its inverse


def shares_by_speed(seconds: Sequence[float], parts: int) -> tuple[int, ...]:
    """Divide `parts` equal parts of a step among workers, by rank, so that the last worker finishes as early as it can.

    n_r = number of parts of rank r, at least 1; each part goes to the worker that would finish it first
    law:    no other integers n_r >= 1 with the same sum have a smaller max(n_r seconds_r); equal times give counts that
            differ by at most one
    source: batches in proportion to speed, LB-BSP (Chen et al. 2020, SoCC, arXiv:1806.02508); here with whole parts

    Args:
        seconds: compute time of one part, by rank, above 0.
        parts: number of parts, at least one per worker.
    """
    require(parts >= len(seconds) >= 1, f"{parts} parts are too few for {len(seconds)} workers: each needs one")
    require(all(each > 0 and isfinite(each) for each in seconds), f"times must be finite and above 0, got {seconds}")
    early = (parts - len(seconds)) / sum(1 / each for each in seconds)  # at most the time of the result
    shares = [max(1, floor(early / each) - 1) for each in seconds]  # one less, for rounding
    finish = [((share + 1) * each, rank) for rank, (share, each) in enumerate(zip(shares, seconds, strict=True))]
    heapify(finish)  # by the time after one more part
    for _ in range(parts - sum(shares)):
        _, rank = finish[0]
        shares[rank] += 1
        heapreplace(finish, ((shares[rank] + 1) * seconds[rank], rank))
    return tuple(shares)


def limited_times(seconds: Sequence[float]) -> list[float] | None:
    """Return reported times, limited to MOST_APART from their median; None while one of them is unknown or invalid.

    Args:
        seconds: compute time of one part or step, by rank; 0 for a rank that has not measured yet.
    """
    return _limited(seconds) if all(isfinite(each) and each > 0 for each in seconds) else None


def _limited(seconds: Sequence[float]) -> list[float]:
    middle = median(seconds)
    return [min(max(each, middle / MOST_APART), middle * MOST_APART) for each in seconds]


def step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Compute time of a step: that of the worker that finishes last."""
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def used_share(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """The part of all workers' time in which they compute, in (0, 1]; they wait for the rest of a step."""
    busy = sum(share * each for share, each in zip(shares, seconds, strict=True))
    return busy / (len(seconds) * step_seconds(shares, seconds))


def useful_share(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Parts per second of a step, as a part of those of the same workers without communication, in (0, 1].

    sum n_r / max(n_r seconds_r) / sum 1/seconds_r;  with equal shares n min(1/seconds_r) / sum 1/seconds_r
    """
    return sum(shares) / step_seconds(shares, seconds) / sum(1 / each for each in seconds)


def enough_parts(seconds: Sequence[float], parts: int) -> int:
    """Double `parts`, at least one per worker, until workers wait for less than LEAST_GAIN of a step by speed."""
    apart, parts = _limited(seconds), max(parts, len(seconds))
    while used_share(shares_by_speed(apart, parts), apart) < 1 - LEAST_GAIN:
        parts *= 2
    return parts


def enough_steps(seconds: Sequence[float], period: int) -> int:
    """Double `period` until workers wait for less than LEAST_GAIN of a round with local steps by speed."""
    apart = _limited(seconds)
    while used_share(steps_by_speed(apart, period), apart) < 1 - LEAST_GAIN:
        period *= 2
    return period


def steps_by_speed(seconds: Sequence[float], period: int) -> tuple[int, ...]:
    """Return the local steps per round of each worker, by rank: `period` of the fastest, at least 1.

    n_r = period min(seconds) / seconds_r, rounded down; up where that makes the round at most LONGER times as long
    source: dynamic local updates, Liu et al. 2024, arXiv:2401.09135

    Args:
        seconds: compute time of a local step, by rank, above 0.
        period: local steps of the fastest worker.
    """
    exact = _exact_steps(seconds, period)
    return tuple(max(1, ceil(each) if ceil(each) <= LONGER * each else floor(each)) for each in exact)


def _exact_steps(seconds: Sequence[float], period: int) -> list[float]:
    return [period * min(seconds) / each for each in seconds]


def next_steps(steps: Sequence[int], seconds: Sequence[float], period: int) -> tuple[int, ...]:
    """Return the local steps of the next round; the present ones unless some speed has changed noticeably.

    Args:
        steps: the present local steps, by rank.
        seconds: measured compute time of a local step, by rank; 0 of a rank that has not measured yet.
        period: local steps of the fastest worker.
    """
    limited = limited_times(seconds)
    if limited is None:
        return tuple(steps)
    changes = zip(_exact_steps(limited, period), steps, strict=True)
    noticeable = any(abs(new - old) > max(LEAST_CHANGE, STEADY * old) for new, old in changes)
    return steps_by_speed(limited, period) if noticeable else tuple(steps)


def steps_until(position: int, steps: int, period: int) -> int:
    """Return the local steps that a worker with `steps` per period has made once it is at `position` or beyond."""
    rounds, within = divmod(position, period)
    return rounds * steps - (-within * steps // period)


def next_shares(shares: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the shares for the next steps; the present ones unless others save at least LEAST_GAIN of a step.

    Args:
        shares: the present number of parts, by rank.
        seconds: measured compute time of one part, by rank. A rank that has not measured yet reports 0, and shares do
            not change. A wrong report cannot take all parts from the other ranks or give all parts to them, because
            of `limited_times`.
    """
    limited = limited_times(seconds)
    if limited is None:
        return tuple(shares)
    better = shares_by_speed(limited, sum(shares))
    gain = 1 - step_seconds(better, limited) / step_seconds(shares, limited)
    return better if gain >= LEAST_GAIN else tuple(shares)
