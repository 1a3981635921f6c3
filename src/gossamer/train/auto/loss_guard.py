"""Loss guard: when what compression loses counts for more, and when it loses too much.

What compressed gradients need more steps for than Dense() counts twice while the learning rate rises (a warm-up), or
where the gradient's norm has moved by more than half from one window to the next: what is lost then is missed most.
Not so for local steps, which on five tasks lost no more in the first third than later (docs/benchmarks/advice.md). And
where what waits to be sent has grown beyond ten gradients, a weaker rung takes over, and rungs as strong are closed for
a while.

source: Agarwal et al. 2021, MLSys (Accordion: the norm's change tells critical phases); Karimireddy et al. 2019, ICML
(what waits is bounded by the gradients, and slows down by its size over theirs)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gossamer.train.auto.measurement import Measurement

CAUTION = 2.0  # times that a rung's loss counts in a critical phase
MOST_MOVED = 0.5  # of the gradient's norm, from one window to the next
WINDOW_STEPS = 50
LEAST_LOOKS = 6  # in two windows
MOST_RESIDUAL_GRADIENTS = 10.0  # the residual's norm over that of the averaged gradient

Norms = tuple[tuple[int, float], ...]  # (step, norm of the averaged gradient), by look


def gradient_norm(measurements: Sequence[Measurement]) -> float | None:
    """The same on all ranks in lock step; of those that know."""
    return max((each.gradient_norm for each in measurements if each.gradient_norm is not None), default=None)


def remember(norms: Norms, step: int, norm: float | None) -> Norms:
    """Keep (step, norm) of each look as long as two windows reach back, and of a few looks at least."""
    kept = [*norms, (step, norm)] if norm is not None else [*norms]
    while len(kept) > LEAST_LOOKS and kept[1][0] <= step - 2 * WINDOW_STEPS:
        del kept[0]
    return tuple(kept)


def moves(norms: Norms) -> bool:
    """Whether the gradient's norm moved by more than MOST_MOVED between the last two windows, or may have: at the
    beginning nobody knows. Where norms are not told at all nothing is known to move."""
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
    """What waits on the rank where most does, in norms of the averaged gradient; None where that is not known."""
    norm = gradient_norm(measurements)
    waits = [each.residual_norm for each in measurements if each.residual_norm is not None]
    return max(waits) / norm if waits and norm else None
