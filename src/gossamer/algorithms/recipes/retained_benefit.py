"""Retained benefit: the share of the benefit of communication that a recipe keeps, with a confidence interval.

retained = (L_silent - L) / (L_silent - L_dense)

L_silent is the held-out loss of workers that never communicate, L_dense that of uncompressed lock step. 1 equals lock
step and 0 equals silence; below 0 the communication did harm. Every loss must come from the same number of samples and
from the arm's own best learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import floor, inf, isfinite, log, sqrt

import numpy as np

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import AveragingStage
from gossamer.base.intervals import ConfidenceInterval, student_quantile
from gossamer.errors import RecipeError, require

Losses = Mapping[int, float]  # by seed; inf or nan where the training diverged

LOW = 0.5  # a share below it deserves a warning


def retained_benefit(losses: Losses, *, silent: Losses, dense: Losses, confidence: float = 0.95) -> ConfidenceInterval:
    """Estimate the retained benefit of one recipe from the seeds that all three arms share.

    With a_i = silent_i - losses_i and b_i = silent_i - dense_i of seed i, the estimate is mean(a) / mean(b). The
    interval holds every r for which mean(a - r b) is not significantly different from 0 by Student's t test. Seeds are
    paired, so an effect of a seed that all arms share cancels.

    Args:
        losses: Held-out losses of the recipe by seed, in any unit that the other arms share.
        silent: Held-out losses of workers that never communicate, by seed.
        dense: Held-out losses of uncompressed lock step, by seed.
        confidence: Probability in (0, 1) that the interval holds the true share.

    Returns:
        The share (1 is lock step). With one seed the interval is unbounded. If a training of the recipe diverged, value
        and bounds are -inf.

    Raises:
        ValueError: The arms share no seed, a training of `silent` or `dense` diverged, or lock step is not better than
            silence, so there is no benefit to retain.

    Source: Fieller 1954, JRSS B 16(2), "Some problems in interval estimation".
    """
    require(0 < confidence < 1, f"confidence is a probability in (0, 1), not {confidence}")
    seeds = sorted(set(losses) & set(silent) & set(dense))
    require(
        bool(seeds),
        f"the arms share no seed: {sorted(losses)}, {sorted(silent)} and {sorted(dense)}. Train all three with the "
        "same seeds.",
    )
    own, apart, together = (np.array([arm[seed] for seed in seeds]) for arm in (losses, silent, dense))
    for name, values in (("silent", apart), ("dense", together)):
        require(
            bool(np.isfinite(values).all()),
            f"a {name} training diverged, so the benefit of communication is unknown. Lower its learning rate.",
        )
    kept, whole = apart - own, apart - together
    require(
        float(whole.mean()) > 0,
        f"lock step (loss {together.mean():.4g}) is not better than silence (loss {apart.mean():.4g}), so there is no "
        "benefit to retain. Train longer, or choose another task.",
    )
    if not np.isfinite(own).all():
        return ConfidenceInterval(value=-inf, low=-inf, high=-inf, confidence=confidence)
    value = float(kept.mean() / whole.mean())
    low, high = _fieller(kept, whole, confidence)
    return ConfidenceInterval(value=value, low=low, high=high, confidence=confidence)


def shares_of_benefit(recipes: Sequence[Recipe], losses: Sequence[Losses]) -> list[ConfidenceInterval | None]:
    """The retained benefit of each recipe. None for all of them if Silent() or Dense() is missing, has no loss or
    diverged, or if Dense() is not better than Silent().

    Args:
        recipes: resolved recipes.
        losses: losses of each recipe by seed.
    """
    ends = resolve("Silent()"), resolve("Dense()")
    if not all(end in recipes for end in ends):
        return [None] * len(recipes)
    silent, dense = (losses[recipes.index(end)] for end in ends)
    try:
        return [retained_benefit(each, silent=silent, dense=dense) for each in losses]
    except ValueError:
        return [None] * len(recipes)


def _fieller(kept: np.ndarray, whole: np.ndarray, confidence: float) -> tuple[float, float]:
    """The r with mean(kept - r whole)^2 <= t^2 var(kept - r whole) / n; unbounded where mean(whole) may be 0."""
    count = len(kept)
    if count < 2:
        return -inf, inf
    factor = student_quantile(confidence, count - 1) ** 2 / count
    (kept_variance, shared), (_, whole_variance) = np.cov(kept, whole)
    square = float(whole.mean() ** 2 - factor * whole_variance)
    if square <= 0:
        return -inf, inf
    linear = float(kept.mean() * whole.mean() - factor * shared)
    constant = float(kept.mean() ** 2 - factor * kept_variance)
    root = sqrt(max(0.0, linear**2 - square * constant))
    return (linear - root) / square, (linear + root) / square


def text(share: ConfidenceInterval) -> str:
    """For a table: "87 % (82 to 91)", "87 %" for one seed, "diverged", and a mark where the communication did harm."""
    if not isfinite(share.value):
        return "diverged"
    bounds = f" ({100 * share.low:.0f} to {100 * share.high:.0f})" if isfinite(share.low) else ""
    harm = ", worse than silence" if share.value < 0 else ""
    return f"{100 * share.value:.0f} %{bounds}{harm}"


# -- measured shares -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasuredShare:
    """The retained benefit of one recipe on one task, as benchmarks/ladder.py has measured it.

    recipe: text. task: name of the rung. workers: number. times_fewer: bytes of float32 lock step over the recipe's.
    rounds: steps of that training over the period of parameter averages; 0 without them. Shares as in
    `retained_benefit`, with a 95 % interval.
    """

    recipe: str
    task: str
    optimizer: str
    workers: int
    times_fewer: float
    rounds: float
    value: float
    low: float
    high: float

    @property
    def share(self) -> ConfidenceInterval:
        return ConfidenceInterval(value=self.value, low=self.low, high=self.high)

    def __str__(self) -> str:
        """For example: 87 % (82 to 91) of the benefit of communication, measured on bytelm-57k-b2 with AdamW, 4 workers
        and 278 rounds."""
        return f"{text(self.share)} of the benefit of communication, measured on {self.where}"

    @property
    def where(self) -> str:
        rounds = (
            f", {self.workers} workers and {self.rounds:.0f} rounds" if self.rounds else f" and {self.workers} workers"
        )
        return f"{self.task} with {self.optimizer}{rounds}"

    @property
    def is_low(self) -> bool:
        """Whether the recipe surely keeps less than half of the benefit of communication."""
        return self.high < LOW


@cache
def measured_shares() -> tuple[MeasuredShare, ...]:
    """All that were measured on admitted tasks with three seeds or more; the best first."""
    found = json.loads(
        files("gossamer.algorithms.recipes").joinpath("retained_benefit.json").read_text(encoding="utf-8")
    )
    return tuple(sorted((MeasuredShare(**each) for each in found), key=lambda each: -each.value))


def measured_share(recipe: Recipe, workers: int) -> MeasuredShare | None:
    """The measured share of a resolved recipe. Of several tasks, one of those with the nearest number of workers, by
    ratio: the one with the narrowest interval."""
    found = [each for each in measured_shares() if _resolves_to(recipe, each, workers)]
    return min(found, key=lambda each: (abs(log(each.workers / workers)), each.high - each.low), default=None)


def _resolves_to(recipe: Recipe, share: MeasuredShare, workers: int) -> bool:
    try:
        return resolve(share.recipe, workers) == recipe
    except RecipeError:  # it names a rank that only more workers have
        return False


def averaging_period(recipe: Recipe) -> int:
    """Steps between two averages of the same parameter in a resolved recipe; 0 if it averages no parameters."""
    stage = recipe.strategy.steady_stage
    return stage.schedule.period if isinstance(stage, AveragingStage) else 0


def rounds_of(recipe: Recipe, steps: int) -> float:
    """Rounds of a training: its steps over the averaging period of a resolved recipe; 0 without averages."""
    period = averaging_period(recipe)
    return steps / period if period else 0.0


@dataclass(frozen=True)
class RoundsBand:
    """The least and the largest retained benefit of `count` recipes in trainings with `least` to `most` rounds."""

    least: float
    most: float
    low: float
    high: float
    count: int

    @property
    def is_low(self) -> bool:
        """Whether all of these recipes kept less than half of the benefit of communication."""
        return self.high < LOW

    def periods(self, steps: int) -> range:
        """Periods with which a training of `steps` steps has as many rounds, and at least one."""
        return range(floor(steps / self.most) + 1, floor(steps / (self.least or 1)) + 1)

    @property
    def rounds(self) -> str:
        """For example: 50 to 100"""
        if not self.least:
            return f"below {self.most:.0f}"
        return f"{self.least:.0f} to {self.most:.0f}" if isfinite(self.most) else f"{self.least:.0f} or more"

    @property
    def retained(self) -> str:
        """For example: 58 to 66 %"""
        return f"{100 * self.low:.0f} to {100 * self.high:.0f} %"


BANDS = 0, 50, 100, 200, 400, 800, inf  # of rounds


def bands(shares: Iterable[tuple[float, float]]) -> Iterator[RoundsBand]:
    """Group (rounds, retained benefit) by rounds, few first; without recipes that communicate in every step."""
    known = [(rounds, value) for rounds, value in shares if rounds]
    for least, most in pairwise(BANDS):
        values = [value for rounds, value in known if least <= rounds < most]
        if values:
            yield RoundsBand(least, most, min(values), max(values), len(values))


def measured_bands() -> list[RoundsBand]:
    """Retained benefit by rounds, over all recipes that were measured."""
    return list(bands((each.rounds, each.value) for each in measured_shares()))


MANY_ROUNDS = 500  # in a training: recipes with as many retained most of the benefit of communication


def with_many_rounds(steps: int) -> str:
    """What to write for a training of `steps` steps, so that it has many rounds."""
    if steps < 2 * MANY_ROUNDS:
        return "a recipe of every step, such as Float4()"
    return f"period={steps // MANY_ROUNDS}"


def rounds_remark(recipe: Recipe, steps: int) -> str | None:
    """What measured recipes retained in trainings with as many rounds; None for a recipe without periods.

    Args:
        recipe: resolved.
        steps: of the training.
    """
    period = averaging_period(recipe)
    if period > steps:
        return f"{steps:,} steps end before the first round of {period:,}. Write {with_many_rounds(steps)}"
    band = band_of(period, steps)
    if period <= 1 or band is None:
        return None
    few = "" if steps >= MANY_ROUNDS * period else f". For more, write {with_many_rounds(steps)}"
    return (
        f"{steps:,} steps have {steps / period:,.4g} rounds of {period} steps; measured recipes with {band.rounds} "
        f"rounds retained {band.retained} of the benefit of communication{few}"
    )


def low_rounds_remark(recipe: Recipe, steps: int) -> str | None:
    """The remark, if all measured recipes with as many rounds retained less than half, or there is no round."""
    period = averaging_period(recipe)
    band = band_of(period, steps)
    return rounds_remark(recipe, steps) if period > steps or (band is not None and band.is_low) else None


def band_of(period: int, steps: int) -> RoundsBand | None:
    """The measured band with as many rounds as a training of `steps` steps; None if it has no round, or none was
    measured."""
    return next((band for band in measured_bands() if period in band.periods(steps)), None)


def better_share(than: MeasuredShare) -> MeasuredShare | None:
    """The recipe that kept most on the same task for as few bytes, where that is another one."""
    best = next(
        (each for each in measured_shares() if each.task == than.task and each.times_fewer >= than.times_fewer), than
    )
    return best if best.value > than.value else None
