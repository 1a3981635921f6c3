"""Loss guard: when the loss of compression counts more, and when it is too large.

The additional steps of compressed gradients relative to Dense() count twice while the learning rate rises (a warm-up),
or if the gradient's norm has changed by more than half between two windows: errors cost most in these phases. This does
not apply to local steps, which on five tasks lost no more in the first third than later (docs/benchmarks/advice.md). If
residuals exceed ten gradients, a weaker rung is used, and rungs of this strength are closed for a while.

source: Agarwal et al. 2021, MLSys (Accordion: the norm's change indicates critical phases); Karimireddy et al. 2019,
ICML (residuals are bounded by gradients, and slow convergence in proportion to their size)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gossamer.train.auto.measurement import Measurement

CAUTION = 2.0  # factor for a rung's loss in a critical phase
MOST_MOVED = 0.5  # relative change of the gradient's norm between two windows
WINDOW_STEPS = 50
LEAST_LOOKS = 6  # in two windows
MOST_RESIDUAL_GRADIENTS = 10.0  # the residual's norm over that of the averaged gradient

Norms = tuple[tuple[int, float], ...]  # (step, norm of the averaged gradient), by look


def gradient_norm(measurements: Sequence[Measurement]) -> float | None:
    """The largest norm that a rank has measured; in lock step all norms are equal."""
    return max((each.gradient_norm for each in measurements if each.gradient_norm is not None), default=None)


def remember(norms: Norms, step: int, norm: float | None) -> Norms:
    """Add (step, norm) of a look, and drop entries older than two windows, but keep at least a few."""
    kept = [*norms, (step, norm)] if norm is not None else [*norms]
    while len(kept) > LEAST_LOOKS and kept[1][0] <= step - 2 * WINDOW_STEPS:
        del kept[0]
    return tuple(kept)


def moves(norms: Norms) -> bool:
    """Whether the gradient's norm changed by more than MOST_MOVED between the last two windows. True at the beginning,
    when it is not known yet; False if norms are not measured."""
    if not norms:
        return False
    if len(norms) < LEAST_LOOKS or norms[-1][0] - norms[0][0] < 2 * WINDOW_STEPS:
        return True
    middle = len(norms) // 2
    before, now = (fmean(norm for _, norm in half) for half in (norms[:middle], norms[middle:]))
    return abs(now - before) > MOST_MOVED * before


def warms_up(measurements: Sequence[Measurement], before: float | None) -> bool:
    """Whether the learning rate has risen since the last look."""
    now = learning_rate(measurements)
    return now is not None and before is not None and now > before


def learning_rate(measurements: Sequence[Measurement]) -> float | None:
    return max((each.learning_rate for each in measurements if each.learning_rate is not None), default=None)


def residual_gradients(measurements: Sequence[Measurement]) -> float | None:
    """The largest residual of any rank, in norms of the averaged gradient; None if it is not known."""
    norm = gradient_norm(measurements)
    waits = [each.residual_norm for each in measurements if each.residual_norm is not None]
    return max(waits) / norm if waits and norm else None
