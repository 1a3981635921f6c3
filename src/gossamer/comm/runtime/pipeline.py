"""Pipelining: issues the collectives of several buckets interleaved, in the order of a table of (script, round).

    begun as    1st  2nd  3rd  4th  5th  6th
    bucket 0    r0        r1                     each bucket's first operation begins before the second operation of the
    bucket 1         r0             r1           previous bucket, so that operations overlap each other and the encoding
    bucket 2                   r0        r1      of the next bucket; results are awaited in the same order

Every rank must begin the same operations in the same order, regardless of local events. The order therefore
depends only on the number of scripts and on the number of operations of each. The order of waits is fixed as well,
because an operation's second hop may only be sent while its result is awaited.

The benefit is not known beforehand. If operations are slow, beginning bucket 1 before bucket 0 continues saves half a
step. If backward is slow, bucket 0 could have continued meanwhile, but continues only after backward, which costs up to
an eighth. Both depths are therefore tried (PipelineTuner). Sums have the same bits in any order, and checkpoints do not
store the depth.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from math import inf, isfinite, nan
from statistics import median
from typing import Any, Protocol

import torch

from gossamer.base.ops import AllGather

DEPTH = 2


def issue_slot(script: int, round_: int, window: int) -> tuple[int, int]:
    """Sort key of a script's `round_`-th operation: (script + (window - 1) * round, round), from 0."""
    return script + (window - 1) * round_, round_


def issue_order(rounds: Sequence[int], window: int = DEPTH) -> list[tuple[int, int]]:
    """Return all operations in the order in which they begin, as (script, round); script s has rounds[s] operations.

    A result is awaited at the turn of the script's next round, or after its last one at the turn of the round that
    would follow.

    >>> issue_order([2, 2, 2])
    [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    """
    ops = [(script, round_) for script, count in enumerate(rounds) for round_ in range(count)]
    return sorted(ops, key=lambda op: issue_slot(op[0], op[1], window))


class Advancing(Protocol):
    """A script that runs operation by operation."""

    def advance(self) -> bool:
        """Wait for the result of the last operation, if there was one, and begin the next; False at the end."""


class Pipeline:
    """Advances scripts in the order of the table above. Each script may have any number of operations.

    The last script is not awaited before another one is put in or `finish` is called. After a failure no script may be
    put in, because the assignment of results to scripts is unknown.

    Args:
        window: A result is awaited once the first operations of window - 1 later scripts have begun. 1: each script
            runs to its end before the next begins.
    """

    def __init__(self, window: int = DEPTH) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}: it is the number of concurrent scripts")
        self._window, self._count = window, 0
        self._turns: list[tuple[tuple[int, int], int, Advancing]] = []  # a heap with unique slots

    def put(self, going: Advancing) -> None:
        """Begin another script, and advance earlier scripts that are due."""
        script, self._count = self._count, self._count + 1
        heappush(self._turns, (issue_slot(script, 0, self._window), script, going))
        self.finish(script)

    def finish(self, until: float = inf) -> None:
        """Advance all scripts to their ends, or up to the turn of script number `until`."""
        while self._turns and self._turns[0][0][0] <= until:
            (_, round_), script, going = heappop(self._turns)
            if going.advance():
                heappush(self._turns, (issue_slot(script, round_ + 1, self._window), script, going))


# -- pipeline depth, chosen by trial -----------------------------------------------------------------------------------

TRIAL_DEPTHS = (1, 2, 2, 1, 1, 2, 2, 1)  # both depths have the same mean position, so a linear drift favors neither
FIRST_TRIAL, TRIAL_PERIOD = 3, 1000  # exchanges before the first trial, and from the beginning of one to the next


class PipelineTuner:
    """Tries depths 1 and DEPTH, and keeps the one with faster exchanges.

    A trial runs TRIAL_DEPTHS after a few exchanges, and again every thousand. Ranks then gather the median time of each
    depth (so that outliers have little weight), and keep the depth with the smaller sum over ranks. The choice depends
    only on the number of exchanges and on gathered numbers, so it is equal on every rank.
    """

    def __init__(self) -> None:
        self._ended, self._kept = 0, DEPTH
        self._took: dict[int, list[float]] = {window: [] for window in (1, DEPTH)}
        self.window = DEPTH  # depth of the next or current exchange
        self.over = False  # whether the last exchange ended a trial, so that ranks must compare now

    def ended(self, seconds: float | None) -> None:
        """Record the time of an exchange; None if it is not representative, for example on a rank without data."""
        if seconds is not None:
            self._took[self.window].append(seconds)
        self._ended += 1
        since = self._ended - FIRST_TRIAL
        place = since % TRIAL_PERIOD if since >= 0 else since  # position since the beginning of the last trial
        if place == 0:
            self._took = {window: [] for window in self._took}
        self.window = TRIAL_DEPTHS[place] if 0 <= place < len(TRIAL_DEPTHS) else self._kept
        self.over = place == len(TRIAL_DEPTHS)

    def compare(self) -> Generator[AllGather, Any, None]:
        """Keep the depth that was faster over all ranks with both times. Sends 16 bytes per rank."""
        own = [median(seconds or [nan]) for seconds in self._took.values()]
        received = yield AllGather((torch.tensor(own, dtype=torch.float64, device="cpu"),))
        found = [both for both in (numbers.tolist() for (numbers,) in received) if all(map(isfinite, both))]
        if found:
            one, several = map(sum, zip(*found, strict=True))
            self.window = self._kept = DEPTH if several < one else 1
