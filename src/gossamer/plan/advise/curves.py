"""Loss curves of a race: when one reaches a target, and comparison with the baseline.

Both train on the same batches from the same seed, so their losses at the same *step* are paired: the effect of a hard
batch on both cancels in the difference. At the same virtual *second* they are at different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from gossamer.base.intervals import (
    FEWEST_BATCHES,
    ConfidenceInterval,
    Floats,
    MeanEstimate,
    mean_estimate,
    student_quantile,
)
from gossamer.observe.target import Target, read_target

LARGEST = 1e100  # of a loss: sums of squares of such values are finite
Point = tuple[int, float, float]  # step, virtual seconds, value


@dataclass(frozen=True)
class LossCurve:
    """steps, seconds, values: (points,), by ascending step; one point per step, the mean of its logged values."""

    steps: Floats
    seconds: Floats
    values: Floats

    @classmethod
    def of(cls, points: Iterable[Point]) -> LossCurve:
        """A curve from (step, virtual seconds, value); values that are not finite, or beyond LARGEST, are dropped."""
        table = np.array([*points], dtype=np.float64).reshape(-1, 3)
        table = table[np.abs(table[:, 2]) <= LARGEST]
        steps, places, counts = np.unique(table[:, 0], return_inverse=True, return_counts=True)
        seconds, values = (np.bincount(places, column, len(steps)) / counts for column in table[:, 1:].T)
        return cls(steps, seconds, values)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> list[Point]:
        return [(int(step), float(at), float(value)) for step, at, value in zip(*self._columns, strict=True)]

    @property
    def every_step(self) -> bool:
        """Whether most steps are logged: then values are of single batches, and are smoothed."""
        return len(self) > 2 and len(self) > 0.5 * (self.steps[-1] - self.steps[0] + 1)

    def until(self, seconds: float) -> LossCurve:
        """The curve up to a virtual second."""
        return self._kept(self.seconds <= seconds * (1 + 1e-9))

    def between_seconds(self, after: float, until: float) -> LossCurve:
        return self._kept((self.seconds > after) & (self.seconds <= until * (1 + 1e-9)))

    def between_steps(self, after: float, until: float) -> LossCurve:
        return self._kept((self.steps > after) & (self.steps <= until))

    def seconds_at(self, step: float) -> float:
        """The virtual second of a step, linearly interpolated."""
        return float(np.interp(step, self.steps, self.seconds))

    def moving_average(self, points: int) -> LossCurve:
        """Means over consecutive points, each at the mean of their steps and seconds."""
        width = max(1, min(points, len(self)))
        if not len(self):
            return self
        kernel = np.full(width, 1 / width)
        return LossCurve(*(np.convolve(column, kernel, mode="valid") for column in self._columns))

    def thinned(self, points: int) -> LossCurve:
        """At most this many points: means of neighbors, for pictures and files."""
        if len(self) <= points:
            return self
        edges = np.linspace(0, len(self), points + 1).astype(int)
        pieces = [slice(first, last) for first, last in pairwise(edges)]
        return LossCurve(*(np.array([column[piece].mean() for piece in pieces]) for column in self._columns))

    @property
    def _columns(self) -> tuple[Floats, Floats, Floats]:
        return self.steps, self.seconds, self.values

    def _kept(self, which: npt.NDArray[np.bool_]) -> LossCurve:
        return LossCurve(*(column[which] for column in self._columns))


# -- time to a target --------------------------------------------------------------------------------------------------


SMOOTHED_POINTS = 10  # of a metric of single batches

__all__ = ["BestReached", "Target", "best_reached", "read_target", "seconds_to", "unreached_text"]


def seconds_to(curve: LossCurve, target: Target) -> float | None:
    """The first virtual second at which the curve has reached the target; None if it has not.

    A metric that is logged in every step is of single batches: its mean over 10 steps is used, at the last of them. One
    that is logged now and then is not smoothed, and interpolated between its points.
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
    """The value closest to a target, its curve, and its virtual second."""

    name: str
    value: float
    seconds: float


def best_reached(curves: Mapping[str, LossCurve], target: Target) -> BestReached | None:
    """The value closest to the target among named curves; None if no curve has its metric."""
    found = []
    for name, curve in curves.items():
        shown = _shown(curve)
        if len(shown):
            place = int(np.argmin(shown.values) if target.below else np.argmax(shown.values))
            found.append(BestReached(name=name, value=float(shown.values[place]), seconds=float(shown.seconds[place])))
    sign = 1 if target.below else -1
    return min(found, key=lambda each: sign * each.value, default=None)


def unreached_text(curves: Mapping[str, LossCurve], target: Target) -> str:
    """Message for a target that no curve reached."""
    best = best_reached(curves, target)
    if best is None:
        return (
            f"no recipe logged {target.metric}, so {target} cannot be evaluated. Log it: "
            f"session.log({target.metric}=...)"
        )
    return (
        f"no recipe reached {target} within the race: the best value was {best.value:.4g}, by {best.name} after "
        f"{best.seconds:.4g} virtual seconds. Use more --minutes, or an easier target"
    )


def _shown(curve: LossCurve) -> LossCurve:
    """The curve to evaluate: each mean at the last second of its points, since it was not known earlier."""
    if not curve.every_step or len(curve) < 2 * SMOOTHED_POINTS:
        return curve
    means = curve.moving_average(SMOOTHED_POINTS)
    return LossCurve(curve.steps[SMOOTHED_POINTS - 1 :], curve.seconds[SMOOTHED_POINTS - 1 :], means.values)


# -- comparison with the baseline --------------------------------------------------------------------------------------


WINDOW = 0.25  # the last part of a race, over which losses are averaged
FEWEST_POINTS = 2 * FEWEST_BATCHES  # in a window
LOOKS = (2, 3, 6, 12)  # divisors of the contender's steps at which a baseline that is ahead is evaluated


@dataclass(frozen=True, kw_only=True)
class AgainstBaseline:
    """A contender compared with the baseline at one virtual second. Losses are means over the last quarter.

    speedup: virtual seconds of the baseline divided by the contender's to the same loss. The lower end is 0 if the
    contender has not reached that loss yet.
    """

    speedup: ConfidenceInterval
    steps_ratio: float  # steps of the contender to a loss over the baseline's; inf if never reached
    loss_at_equal_steps: ConfidenceInterval  # the contender's minus the baseline's, paired
    loss_at_equal_seconds: ConfidenceInterval  # the contender's minus the baseline's, not paired


def against_baseline(
    contender: LossCurve, baseline: LossCurve, seconds: float, confidence: float = 0.95
) -> AgainstBaseline:
    """Compare at virtual second `seconds`, up to which both are known. Lower losses are better.

    The baseline may be ahead in steps: one of its steps may take as long as a hundred of the contender's. Then it is
    evaluated at half of the contender's steps at most, so that the contender has as many steps again to reach its loss;
    or at a third, a sixth or a twelfth, the latest at which the contender has significantly reached it. All evaluations
    together have the requested confidence.
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
    """The contender's loss minus the baseline's, over the last quarter of the steps that both have made."""
    steps, local, others = np.intersect1d(contender.steps, baseline.steps, assume_unique=True, return_indices=True)
    if not len(steps):
        return MeanEstimate(value=float("nan"), standard_error=inf, freedom=0)
    late = steps > _window_begin(steps)
    return mean_estimate((contender.values[local] - baseline.values[others])[late])


def difference_at(contender: LossCurve, other: LossCurve, seconds: float) -> MeanEstimate:
    """A contender's loss minus another's in the last quarter of the virtual seconds, with separate batches."""
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
    """Difference of losses at the baseline's last steps, the speedup to there, and the ratio of steps."""
    paired = paired_difference(contender, baseline)
    return paired, *_speedup(contender, baseline, paired, confidence)


def _speedup(
    contender: LossCurve, baseline: LossCurve, paired: MeanEstimate, confidence: float
) -> tuple[ConfidenceInterval, float]:
    """The speedup and the ratio of steps: where the contender's own curve has reached the baseline's loss.

    Its moving average m, as wide as the window, is m(c) in the window's middle c. It has reached the baseline's loss
    when m(s) = m(c) - d. The noise of d is that of the pairs; if s differs from c, also of both means of the contender.
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
        """The ratio; 0 if the contender has not reached this loss."""
        seconds = _first_seconds(mean, loss)
        return reached_by_baseline / seconds if seconds else 0.0

    step = _first_step(mean, level)
    apart = min(1.0, abs(step - center) / (last - begin))
    error = sqrt(paired.standard_error**2 + 2 * apart * own.standard_error**2)
    half = student_quantile(confidence, paired.freedom) * error
    most = reached_by_baseline / float(contender.seconds[-1])  # if it has not reached the loss so far
    interval = ConfidenceInterval(
        value=ratio(level), low=ratio(level - half), high=ratio(level + half) or most, confidence=confidence
    )
    return interval, step / center


def _window_begin(steps: Floats) -> float:
    """The step before the window: the last quarter, or more if that has too few points."""
    quarter = (1 - WINDOW) * float(steps[-1])
    return min(quarter, float(steps[-FEWEST_POINTS - 1])) if len(steps) > FEWEST_POINTS else quarter


def _first_step(mean: LossCurve, loss: float) -> float:
    reached = mean.values <= loss
    return float(mean.steps[int(np.argmax(reached))] if reached.any() else inf)


def _first_seconds(mean: LossCurve, loss: float) -> float | None:
    """The second at which the curve crosses a loss, interpolated between its points; None if it does not."""
    reached = mean.values <= loss
    if not reached.any():
        return None
    place = int(np.argmax(reached))
    if place == 0:
        return float(mean.seconds[0])
    above, below = mean.values[place - 1], mean.values[place]
    share = (above - loss) / (above - below)
    return float(mean.seconds[place - 1] + share * (mean.seconds[place] - mean.seconds[place - 1]))
