"""Target time: the first virtual second at which a curve has reached a target such as validation_loss<2.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gossamer.observe.target import Target, read_target
from gossamer.plan.advise.racing.loss_curve import LossCurve

SMOOTHED_POINTS = 10  # of a metric of single batches

__all__ = ["BestReached", "Target", "best_reached", "read_target", "seconds_to", "unreached_text"]


def seconds_to(curve: LossCurve, target: Target) -> float | None:
    """The first virtual second at which the curve has reached the target; None where it has not.

    A metric that is logged in every step is of single batches: its mean over 10 steps counts, at the last of them. One
    that is logged now and then is taken as it is, and interpolated between its points.
    """
    shown = _shown(curve)
    reached = shown.values < target.value if target.below else shown.values > target.value
    if not reached.any():
        return None
    place = int(np.argmax(reached))
    if place == 0:
        return float(shown.seconds[0])
    before, after = shown.values[place - 1], shown.values[place]
    share = (target.value - before) / (after - before)
    return float(shown.seconds[place - 1] + share * (shown.seconds[place] - shown.seconds[place - 1]))


@dataclass(frozen=True, kw_only=True)
class BestReached:
    """The value nearest to a target, by whom, and at which virtual second."""

    name: str
    value: float
    seconds: float


def best_reached(curves: Mapping[str, LossCurve], target: Target) -> BestReached | None:
    """What came nearest to the target among named curves; None where nobody logged its metric."""
    found = []
    for name, curve in curves.items():
        shown = _shown(curve)
        if len(shown):
            place = int(np.argmin(shown.values) if target.below else np.argmax(shown.values))
            found.append(BestReached(name=name, value=float(shown.values[place]), seconds=float(shown.seconds[place])))
    sign = 1 if target.below else -1
    return min(found, key=lambda each: sign * each.value, default=None)


def unreached_text(curves: Mapping[str, LossCurve], target: Target) -> str:
    """What to say of a target that nobody reached."""
    best = best_reached(curves, target)
    if best is None:
        return (
            f"nobody logged {target.metric}, so {target} could not be looked for. Log it: "
            f"session.log({target.metric}=...)"
        )
    return (
        f"nobody reached {target} within the race: the best was {best.value:.4g}, by {best.name} after "
        f"{best.seconds:.4g} virtual seconds. Give it more --minutes, or a target that is nearer"
    )


def _shown(curve: LossCurve) -> LossCurve:
    """At the last second of each mean, since it was known no earlier."""
    if not curve.every_step or len(curve) < 2 * SMOOTHED_POINTS:
        return curve
    means = curve.moving_average(SMOOTHED_POINTS)
    return LossCurve(curve.steps[SMOOTHED_POINTS - 1 :], curve.seconds[SMOOTHED_POINTS - 1 :], means.values)
