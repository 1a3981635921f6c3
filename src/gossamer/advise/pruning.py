"""Pruning: leaves the candidates that are worth a trial, and says why of every other."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.advise.foretell import Foretold
from gossamer.profiling.gradient_statistics import GradientStatistics


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

    memory_limit_bytes: that one worker may keep; None: this machine's.
    """
    raise NotImplementedError
