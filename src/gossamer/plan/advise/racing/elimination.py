"""Elimination: who goes out of a race, by loss and by what a virtual second of it takes this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from gossamer.plan.advise.racing.contender import Contender

FINALISTS = 2  # beside the baseline
FIRST_STEPS = 8  # of each challenger, before it is judged
DEAR = 2.0  # times its even part of what a virtual second of all takes


def kept_of(challengers: int) -> int:
    """Of so many, those that go on from a halving."""
    return max(FINALISTS, ceil(challengers / 2))


def dear_and_behind(ranked: Sequence[Contender], pace: Callable[[Contender], float]) -> Contender | None:
    """The dearest of those that would go out at a halving now, if it takes more than DEAR times its even part.

    ranked: the best first. pace: this machine's part of the budget that a virtual second of one takes. Who is dear and
    ahead stays: that is where the answer is decided.
    """
    dearest = DEAR * sum(map(pace, ranked)) / max(1, len(ranked))
    behind = [each for each in ranked[kept_of(len(ranked)) :] if each.steps >= FIRST_STEPS and pace(each) > dearest]
    return max(behind, key=pace, default=None)
