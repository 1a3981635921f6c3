"""Pipelining: issues the collectives of several buckets interleaved, in the order of a table of (script, round).

    begun as    1st  2nd  3rd  4th  5th  6th
    bucket 0    r0        r1                     a bucket's first operation begins before the second of the one before
    bucket 1         r0             r1           it, so that operations travel beside each other, and while the next
    bucket 2                   r0        r1      bucket is encoded; answers are waited for in the same order

Every rank must begin the same operations in the same order, whatever is ready there and whatever has arrived. So the
order follows from nothing but how many scripts were begun, and how many operations each of them has asked for. Answers
are waited for in an order that is as fixed: an operation's second hop may leave only while its answer is waited for.

What that saves and costs is not known beforehand. Where operations take long, to begin bucket 1 before bucket 0 goes on
saves half a step; where backward takes long, bucket 0 could have gone on meanwhile, and now does so when backward is
over, which costs up to an eighth. So both are tried (PipelineTuner). Sums are the same bits in any order, and no
checkpoint says which it was.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from math import isfinite, nan
from statistics import median
from typing import Any, Protocol

import torch

from gossamer.base.ops import AllGather

DEPTH = 2


def issue_slot(script: int, round_: int, window: int) -> tuple[int, int]:
    """The place of a script's `round_`-th operation among all: (script + (window - 1) round, round), from 0."""
    return script + (window - 1) * round_, round_


def issue_order(rounds: Sequence[int], window: int = DEPTH) -> list[tuple[int, int]]:
    """The operations in the order in which they begin, as (script, round), where script s asks for rounds[s] of them.

    An answer is waited for when the turn of the next round comes, and the last one's when there would be one.

    >>> issue_order([2, 2, 2])
    [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    """
    ops = [(script, round_) for script, count in enumerate(rounds) for round_ in range(count)]
    return sorted(ops, key=lambda op: issue_slot(op[0], op[1], window))


class Advancing(Protocol):
    """A script that runs operation by operation."""

    def advance(self) -> bool:
        """Wait for the answer to the last operation, if there was one, and begin the next; False at the end."""


class Pipeline:
    """Advances scripts in the order of the table above; each may ask for any number of operations.

    window: an answer is waited for once the first operations of so many - 1 later scripts were begun; 1: each script
    runs to its end before the next begins. The script that was put in last is not waited for before more is put in, or
    `finish` is called. After a failure nothing may be put in any more: which answer belongs to which script is open.
    """

    def __init__(self, window: int = DEPTH) -> None:
        if window < 1:
            raise ValueError(f"window counts the scripts that go on at once, at least 1, not {window}")
        self._window, self._count = window, 0
        self._turns: list[tuple[tuple[int, int], int, Advancing]] = []  # a heap; no two slots are equal

    def put(self, going: Advancing) -> None:
        """Begin another script, and advance those before it as far as their turns have come."""
        script, self._count = self._count, self._count + 1
        heappush(self._turns, (issue_slot(script, 0, self._window), script, going))
        self._run_until(script)

    def finish(self) -> None:
        """Advance all scripts to their ends."""
        while self._turns:
            ((now, _), _, _) = self._turns[0]
            self._run_until(now)

    def _run_until(self, now: int) -> None:
        while self._turns and self._turns[0][0][0] <= now:
            (_, round_), script, going = heappop(self._turns)
            if going.advance():
                heappush(self._turns, (issue_slot(script, round_ + 1, self._window), script, going))


# -- how many scripts advance at once, chosen by trial -----------------------------------------------------------------

TRIAL_DEPTHS = (1, 2, 2, 1, 1, 2, 2, 1)  # their middles lie together: what changes from step to step favors neither
FIRST_TRIAL, TRIAL_PERIOD = 3, 1000  # exchanges before the first, and from the beginning of one to that of the next


class PipelineTuner:
    """Tries the pipeline with one script and with DEPTH scripts at once, and keeps what let exchanges end sooner.

    After a few exchanges, and after every thousand, TRIAL_DEPTHS is gone through; then ranks gather the medians of what
    either depth took (so that a hiccup counts little) and keep the one whose sum over ranks is smaller. The choice
    follows from the number of exchanges and from gathered numbers alone, so it is the same on every rank.
    """

    def __init__(self) -> None:
        self._ended, self._kept = 0, DEPTH
        self._took: dict[int, list[float]] = {window: [] for window in (1, DEPTH)}
        self.window = DEPTH  # the depth of the exchange that is next, or goes on
        self.over = False  # whether the exchange that ended was the last of a trial, so that ranks compare now

    def ended(self, seconds: float | None) -> None:
        """Record how long an exchange took; None where that is not representative, as on a rank without data."""
        if seconds is not None:
            self._took[self.window].append(seconds)
        self._ended += 1
        since = self._ended - FIRST_TRIAL
        place = since % TRIAL_PERIOD if since >= 0 else since  # in the trial that goes on, or was the last to begin
        if place == 0:
            self._took = {window: [] for window in self._took}
        self.window = TRIAL_DEPTHS[place] if 0 <= place < len(TRIAL_DEPTHS) else self._kept
        self.over = place == len(TRIAL_DEPTHS)

    def compare(self) -> Generator[AllGather, Any, None]:
        """Keep the depth that all ranks together found faster; ranks that lack one do not count. 16 bytes each."""
        mine = [median(seconds or [nan]) for seconds in self._took.values()]
        heard = yield AllGather((torch.tensor(mine, dtype=torch.float64, device="cpu"),))
        found = [both for both in (numbers.tolist() for (numbers,) in heard) if all(map(isfinite, both))]
        if found:
            one, several = map(sum, zip(*found, strict=True))
            self.window = self._kept = DEPTH if several < one else 1
