"""Comparison with the baseline: a contender's speedup over Dense, and what it costs in loss, each with an interval.

Both train on the same batches from the same seed, so their losses at the same *step* are paired: what a batch adds to
both, because it is a hard one, cancels in the difference. At the same virtual *second* they are at different steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np

from gossamer.plan.advise.racing.batch_means import (
    FEWEST_BATCHES,
    ConfidenceInterval,
    MeanEstimate,
    mean_estimate,
    student_quantile,
)
from gossamer.plan.advise.racing.loss_curve import Floats, LossCurve

WINDOW = 0.25  # the last part of a race, over which losses are averaged
FEWEST_POINTS = 2 * FEWEST_BATCHES  # in a window
LOOKS = (2, 3, 6, 12)  # parts of the contender's steps, at whose ends a baseline that ran ahead is looked at


@dataclass(frozen=True, kw_only=True)
class AgainstBaseline:
    """A contender beside the baseline at one virtual second. Losses: of windows, the last quarter up to there.

    speedup: virtual seconds of the baseline to where it is, over the contender's to the same loss; 0 below where the
    contender has not been there yet.
    """

    speedup: ConfidenceInterval
    steps_ratio: float  # of the steps that the contender needs to a loss, over the baseline's; inf where never there
    loss_at_equal_steps: ConfidenceInterval  # the contender's less the baseline's, paired
    loss_at_equal_seconds: ConfidenceInterval  # likewise, not paired


def against_baseline(
    contender: LossCurve, baseline: LossCurve, seconds: float, confidence: float = 0.95
) -> AgainstBaseline:
    """Compare at virtual second `seconds`, up to which both are known. Losses: the lower, the better.

    The baseline may have run ahead of it: a step of it may take as long as a hundred of the contender's. It is looked
    at no further than half the contender's steps then, which leaves that as many again to make up for being behind; or
    at a third, a sixth or a twelfth, the furthest at which it has surely made up for it. All looks together have the
    confidence asked for.
    """
    contender, there = contender.until(seconds), baseline.until(seconds)
    made = there.steps[-1] if len(there) else 0.0
    ends = sorted({max(made, contender.steps[-1] / part if len(contender) else 0.0) for part in LOOKS}, reverse=True)
    each = 1 - (1 - confidence) / len(ends)
    looks = [_look(contender, baseline.between_steps(0.0, end), each) for end in ends]
    paired, speedup, steps_ratio = next((look for look in looks if look[1].low > 0), looks[0])
    apart = difference_at(contender, there, seconds)
    return AgainstBaseline(
        speedup=replace(speedup, confidence=confidence),
        steps_ratio=steps_ratio,
        loss_at_equal_steps=paired.interval(confidence),
        loss_at_equal_seconds=apart.interval(confidence),
    )


def paired_difference(contender: LossCurve, baseline: LossCurve) -> MeanEstimate:
    """The contender's loss less the baseline's, at the last quarter of the steps that both have made."""
    steps, mine, others = np.intersect1d(contender.steps, baseline.steps, assume_unique=True, return_indices=True)
    if not len(steps):
        return MeanEstimate(value=float("nan"), standard_error=inf, freedom=0)
    late = steps > _window_begin(steps)
    return mean_estimate((contender.values[mine] - baseline.values[others])[late])


def difference_at(contender: LossCurve, other: LossCurve, seconds: float) -> MeanEstimate:
    """A contender's loss less another's in the last quarter of the virtual seconds, by batches of their own."""
    first, second = (
        mean_estimate(each.between_seconds((1 - WINDOW) * seconds, seconds).values) for each in (contender, other)
    )
    return MeanEstimate(
        value=first.value - second.value,
        standard_error=sqrt(first.standard_error**2 + second.standard_error**2),
        freedom=min(first.freedom, second.freedom),
    )


def _look(
    contender: LossCurve, baseline: LossCurve, confidence: float
) -> tuple[MeanEstimate, ConfidenceInterval, float]:
    """How far apart they are at the baseline's last steps, the speedup to there, and the ratio of steps."""
    paired = paired_difference(contender, baseline)
    return paired, *_speedup(contender, baseline, paired, confidence)


def _speedup(
    contender: LossCurve, baseline: LossCurve, paired: MeanEstimate, confidence: float
) -> tuple[ConfidenceInterval, float]:
    """And the ratio of steps: where the contender's own curve has made up for what it is behind at equal steps.

    Its moving average m, as wide as the window, is at m(c) in the window's middle c; it is where the baseline was
    when m(s) = m(c) - d. Noise of d is the pairs'; where s lies apart from c, of both means of the contender, too.
    """
    unknown = ConfidenceInterval(value=float("nan"), low=0.0, high=inf, confidence=confidence)
    if not paired.freedom:
        return unknown, inf
    common = np.intersect1d(contender.steps, baseline.steps, assume_unique=True)
    begin, last = _window_begin(common), float(common[-1])
    window = contender.between_steps(begin, last)
    center, width = float(window.steps.mean()), len(window)
    own = mean_estimate(window.values)
    mean = contender.moving_average(width)
    level = float(window.values.mean()) - paired.value
    reached_by_baseline = baseline.seconds_at(center)

    def ratio(loss: float) -> float:
        """0 where the contender has never been there."""
        seconds = _first_seconds(mean, loss)
        return reached_by_baseline / seconds if seconds else 0.0

    step = _first_step(mean, level)
    apart = min(1.0, abs(step - center) / (last - begin))
    error = sqrt(paired.standard_error**2 + 2 * apart * own.standard_error**2)
    half = student_quantile(confidence, paired.freedom) * error
    most = reached_by_baseline / float(contender.seconds[-1])  # where it has not been there so far
    interval = ConfidenceInterval(
        value=ratio(level), low=ratio(level - half), high=ratio(level + half) or most, confidence=confidence
    )
    return interval, step / center


def _window_begin(steps: Floats) -> float:
    """The step after which the window begins: the last quarter, or more where that has too few points."""
    quarter = (1 - WINDOW) * float(steps[-1])
    return min(quarter, float(steps[-FEWEST_POINTS - 1])) if len(steps) > FEWEST_POINTS else quarter


def _first_step(mean: LossCurve, loss: float) -> float:
    reached = mean.values <= loss
    return float(mean.steps[int(np.argmax(reached))] if reached.any() else inf)


def _first_seconds(mean: LossCurve, loss: float) -> float | None:
    """The second at which the curve crosses a loss, interpolated between its points; None where it does not."""
    reached = mean.values <= loss
    if not reached.any():
        return None
    place = int(np.argmax(reached))
    if place == 0:
        return float(mean.seconds[0])
    above, below = mean.values[place - 1], mean.values[place]
    share = (above - loss) / (above - below)
    return float(mean.seconds[place - 1] + share * (mean.seconds[place] - mean.seconds[place - 1]))
