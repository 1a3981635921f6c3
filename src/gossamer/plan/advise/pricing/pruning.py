"""Pruning: leaves the candidates that are worth a trial, and says why of every other.

What saves less than a tenth of a step over what loses nothing is not worth a change (Agarwal et al. 2022, MLSys,
arXiv:2103.00543: most of what was proposed is that; Han et al. 2024, arXiv:2407.01378: compare with half precision).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.units import bytes_text, seconds_text
from gossamer.plan.advise.pricing.candidates import DENSE
from gossamer.plan.advise.pricing.foretell import Foretold
from gossamer.plan.profile.gradient_statistics import GradientStatistics

HALF = "Dense(dtype='bfloat16')"
LEAST_GAIN = 0.1  # of a pass's seconds, below which a change is not worth its trouble
MOST_BEHIND = 3.0  # times the best's expected seconds: by as much the prior of steps may be wrong
MOST_OF_A_KIND = 2  # that are tried of one strategy with one compressor, whatever their numbers
MEMORY_SHARE = 0.5  # of a machine's, that what recipes remember may take

WRAPPERS = ("Feedback", "Hierarchical", "Rotated", "Route", "Sharded", "SparseSum", "Warmup")

Reason = Callable[[Foretold], str | None]


def survivors(foretold: Sequence[Foretold], statistics: GradientStatistics | None, most: int) -> list[Foretold]:
    """At most so many candidates to try: Dense() first, then by expected seconds. See `judged` for the others."""
    return [each for each in judged(foretold, statistics, most) if each.excluded is None]


def judged(
    foretold: Sequence[Foretold],
    statistics: GradientStatistics | None,
    most: int,
    memory_limit_bytes: float | None = None,
) -> list[Foretold]:
    """All candidates: first those to try, Dense() and then by expected seconds; then the others, with the reason.

    statistics: by which candidates() has left some out already; None where none were taken. memory_limit_bytes: of
    what one worker may remember beside its model; None: half of this machine's.
    """
    limit = machine_bytes() * MEMORY_SHARE if memory_limit_bytes is None else memory_limit_bytes
    left, out = _split(foretold, partial(_too_large, limit=limit))
    left, slow = _split(left, _gain(left))
    left, dominated = _split(left, partial(_dominated, others=left))
    left, late = _split(left, _behind(left))
    ordered = sorted(left, key=lambda each: (each.recipe != DENSE, each.expected_seconds))
    tried, later = _first(ordered, most)
    return [*tried, *later, *late, *dominated, *slow, *out]


def machine_bytes() -> float:
    """The memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _split(foretold: Iterable[Foretold], reason: Reason) -> tuple[list[Foretold], list[Foretold]]:
    """Those that stay, and those that are excluded already or now. Dense() stays: all others are held against it."""
    stay: list[Foretold] = []
    out: list[Foretold] = []
    for each in foretold:
        why = each.excluded or (None if each.recipe == DENSE else reason(each))
        (out if why else stay).append(replace(each, excluded=why))
    return stay, out


def _too_large(each: Foretold, limit: float) -> str | None:
    if each.memory_bytes <= limit:
        return None
    return (
        f"it would remember {bytes_text(each.memory_bytes)} beside the model, and {bytes_text(limit)} are free for that"
    )


def _gain(foretold: Sequence[Foretold]) -> Reason:
    """Why one is not fast enough, held against what loses nothing: Dense(), or half precision where that gains."""
    seconds = {each.recipe: each.pass_seconds for each in foretold}
    dense = seconds[DENSE]
    half = seconds.get(HALF, dense)
    lossless, best = (HALF, half) if half < (1 - LEAST_GAIN) * dense else (DENSE, dense)

    def reason(each: Foretold) -> str | None:
        than, name = (dense, DENSE) if each.recipe == HALF else (best, lossless)
        if each.pass_seconds < (1 - LEAST_GAIN) * than:
            return None
        return (
            f"a backward pass takes {seconds_text(each.pass_seconds)} with it and {seconds_text(than)} with {name}: "
            f"less than {LEAST_GAIN:.0%} saved"
        )

    return reason


def _dominated(each: Foretold, others: Sequence[Foretold]) -> str | None:
    """Why another one is better in all: as fast or faster, with a strategy and a compressor that lose no more."""
    for other in others:
        if _beats(other, each):
            return (
                f"{other.recipe} takes {seconds_text(other.pass_seconds)} for a backward pass, this one "
                f"{seconds_text(each.pass_seconds)}, and it is expected to lose no less"
            )
    return None


def _beats(one: Foretold, other: Foretold) -> bool:
    """A partial order: what loses less by its strategy and more by its compressor is neither better nor worse."""
    mine, theirs = ((each.pass_seconds, each.strategy_passes, each.compressor_passes) for each in (one, other))
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _behind(foretold: Sequence[Foretold]) -> Reason:
    """Why one is too far behind for a prior to be wrong by so much."""
    best = min(foretold, key=lambda each: each.expected_seconds)

    def reason(each: Foretold) -> str | None:
        times = each.expected_seconds / best.expected_seconds
        if times <= MOST_BEHIND:
            return None
        return f"it is expected to take {times:.1f} times as long to a loss as {best.recipe}, and is not tried"

    return reason


def _first(ordered: Sequence[Foretold], most: int) -> tuple[list[Foretold], list[Foretold]]:
    tried: list[Foretold] = []
    late: list[Foretold] = []
    kinds: Counter[str] = Counter()
    for each in ordered:
        kind = kind_of(each.recipe)
        why = None
        if kinds[kind] >= MOST_OF_A_KIND:
            why = f"{MOST_OF_A_KIND} recipes of its kind, {kind}, are expected to reach a loss sooner"
        elif len(tried) >= most:
            why = f"{most} recipes are expected to reach a loss sooner, and more are not tried"
        kinds[kind] += why is None
        (late if why else tried).append(replace(each, excluded=why))
    return tried, late


def kind_of(recipe: str) -> str:
    """The names of a recipe's terms without their numbers, nor what only wraps others: "LocalSGD + TopK + Complete"."""
    resolved = resolve(recipe)
    names = [type(term).__name__ for term in resolved.compressor.held()]
    compressor = next((name for name in names if name not in WRAPPERS), names[0])
    return " + ".join((type(resolved.strategy).__name__, compressor, type(resolved.topology).__name__))
