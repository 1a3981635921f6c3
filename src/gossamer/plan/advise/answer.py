"""Answer: the recommendation in three lines, its gain, its cost, and the networks that would change it.

If no recipe is faster than plain Dense() beyond noise, the answer is to change nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import measured_share, rounds_remark
from gossamer.base.intervals import ConfidenceInterval
from gossamer.base.units import rate_text, seconds_text
from gossamer.plan.advise.curves import Target, seconds_to, unreached_text
from gossamer.plan.advise.race import Contender, RaceResult
from gossamer.plan.advise.thresholds import LeadRange

WORTHWHILE = 1.1  # minimum speedup that is worth another recipe


@dataclass(frozen=True, kw_only=True)
class Answer:
    """recipe: the recommended one. use, gain, cost: one line each. would_change: best recipes on other networks."""

    recipe: str
    learning_rate_factor: float
    change: bool
    use: str
    gain: str
    cost: str
    command: str
    would_change: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The request.

    network: as written by the user. speeds: of the workers, by rank; empty: all are equal. steps: of the training that
    the recipe is for; None: unknown.
    """

    script: str
    arguments: Sequence[str]
    workers: int
    network: str
    target: Target | None = None
    speeds: tuple[float, ...] = ()
    steps: int | None = None

    @property
    def conditions(self) -> str:
        """Network and speeds, as text."""
        return self.network + (f" and speeds {', '.join(f'{each:g}' for each in self.speeds)}" if self.speeds else "")

    def command(self, recipe: str) -> str:
        """The command to run it. It does not emulate the network, which is the real one."""
        run = ["gossamer", "run", "--workers", str(self.workers), "--recipe", recipe, self.script, *self.arguments]
        return shlex.join(run)


def answer(
    race: RaceResult, setting: Setting, thresholds: Sequence[LeadRange] = (), remarks: Sequence[str] = ()
) -> Answer:
    """The answer from a race. remarks: to be added to it."""
    notes = (*remarks, *race.remarks, *_target_remarks(race, setting.target))
    best = winner(race)
    changes = tuple(map(threshold_text, thresholds))
    if best is None:
        return Answer(
            recipe=race.baseline.recipe,
            learning_rate_factor=race.reference.learning_rate_factor,
            change=False,
            use=f"change nothing: train with {race.baseline.recipe}, the same as DDP{_rate(race.reference)}",
            gain=_nothing_gained(race),
            cost="no change in loss",
            command=setting.command(race.baseline.recipe),
            would_change=changes,
            remarks=notes,
        )
    return Answer(
        recipe=best.recipe,
        learning_rate_factor=best.learning_rate_factor,
        change=True,
        use=f"use {best.recipe}{_rate(best)}",
        gain=_gain(best, race, setting),
        cost=_cost(best, race),
        command=setting.command(best.recipe),
        would_change=changes,
        remarks=(*notes, *_measured_remarks(best.recipe, setting)),
    )


def winner(race: RaceResult) -> Contender | None:
    """The best finalist, if it is significantly and notably faster than the baseline to the same loss."""
    others = [each for each in race.contenders if each.out is None and each.recipe != race.baseline.recipe]
    if not others or others[0].against is None:
        return None
    speedup = others[0].against.speedup
    sure = speedup.low > 1 and isfinite(speedup.high) and speedup.value >= WORTHWHILE
    return others[0] if sure else None


def threshold_text(threshold: LeadRange) -> str:
    """Text such as "rate below 40 Mbit/s: DiLoCo(period=20)"."""
    text = rate_text if threshold.of == "rate" else seconds_text
    if threshold.below is None:
        where = f"{threshold.of} above {text(threshold.above)}" if threshold.above else f"any {threshold.of}"
    elif threshold.above:
        where = f"{threshold.of} from {text(threshold.above)} to {text(threshold.below)}"
    else:
        where = f"{threshold.of} below {text(threshold.below)}"
    return f"{where}: {threshold.recipe}"


def _rate(contender: Contender) -> str:
    factor = contender.learning_rate_factor
    return f", with the learning rate x {factor:g}" if factor != 1 else ""


def _gain(best: Contender, race: RaceResult, setting: Setting) -> str:
    assert best.against is not None
    speedup = best.against.speedup
    over = f"{race.reference.name}, estimated for {setting.conditions}"
    text = f"{speedup.value:.2f}x as fast to the same {race.metric} ({_between(speedup)}) as {over}"
    if setting.target is None:
        return text
    ends = [seconds_to(each.curve(setting.target.metric), setting.target) for each in (best, race.reference)]
    shown = ["not within the race" if end is None else f"after {seconds_text(end)}" for end in ends]
    return f"{text}; {setting.target} {shown[0]}, with {race.reference.recipe} {shown[1]}"


def _cost(best: Contender, race: RaceResult) -> str:
    assert best.against is not None
    lost = best.against.loss_at_equal_steps
    where = f"{race.metric} at equal steps"
    if not isfinite(lost.high):
        return f"the cost in {where} could not be measured: too few steps"
    if not lost.excludes_zero:
        return f"no difference in {where} beyond noise: {lost.value:+.3g} ({_between(lost, '+.3g')})"
    text = f"{lost.value:+.3g} in {where} ({_between(lost, '+.3g')})"
    if lost.value < 0:
        return f"{text}: lower than with {race.baseline.recipe}"
    return f"{text}, included in the gain"


def _nothing_gained(race: RaceResult) -> str:
    best = next((each for each in race.contenders[1:] if each.recipe != race.baseline.recipe and each.against), None)
    if best is None or best.against is None:
        return "no other recipe reached the end of the race"
    speedup = best.against.speedup
    if not isfinite(speedup.high):
        return f"no significant difference: {best.name} made too few steps for a comparison with {race.baseline.recipe}"
    if speedup.value == 0:
        return f"the best other recipe, {best.name}, did not reach the {race.metric} of {race.reference.name}"
    sentence = f"the best other recipe, {best.name}, is {speedup.value:.2f}x as fast ({_between(speedup)})"
    if speedup.low <= 1:
        return f"{sentence}: not beyond noise"
    return f"{sentence}: less than {WORTHWHILE:g}x is not worth another recipe"


def _between(interval: ConfidenceInterval, form: str = ".2f") -> str:
    return f"{100 * interval.confidence:.3g} % interval {interval.low:{form}} to {interval.high:{form}}"


def _measured_remarks(text: str, setting: Setting) -> Iterator[str]:
    """Measured retained benefit of the recipe, and by its rounds, because a race is too short to show it."""
    recipe = resolve(text, setting.workers)
    known = measured_share(recipe, setting.workers)
    if known is not None:
        yield f'{text} retains {known}: "Retained benefit over model size" in the documentation'
    remark = None if setting.steps is None else rounds_remark(recipe, setting.steps)
    if remark is not None:
        yield remark


def _target_remarks(race: RaceResult, target: Target | None) -> tuple[str, ...]:
    if target is None:
        return ()
    curves = {each.name: each.curve(target.metric) for each in race.contenders}
    if any(len(curve) and seconds_to(curve, target) is not None for curve in curves.values()):
        return ()
    return (unreached_text(curves, target),)
