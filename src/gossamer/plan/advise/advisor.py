"""Advisor: profiles a script, estimates every candidate's step, races the best ones, and recommends a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf, isclose, isfinite
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.intervals import ConfidenceInterval
from gossamer.base.torch_hooks import uncompiled
from gossamer.base.units import seconds_text
from gossamer.comm.network import Network
from gossamer.events import Attached, Event, subscribe
from gossamer.plan.advise.advice_file import (
    MOST_POINTS,
    Advice,
    CandidateRow,
    ConfirmedRow,
    ContenderRow,
    FindingRow,
    Range,
    RungRow,
    written,
)
from gossamer.plan.advise.answer import Answer, Setting, answer
from gossamer.plan.advise.candidates import GradientFinding, candidates, findings
from gossamer.plan.advise.curves import Point, Target, seconds_to
from gossamer.plan.advise.prices import Prediction, StepPricer, estimate_all, judged
from gossamer.plan.advise.race import FEWEST_STEPS, LOSSES, NO_LOSS, Contender, Race, RaceError, RaceJob, RaceResult
from gossamer.plan.advise.thresholds import LeadRange, thresholds
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.profile.gradient_statistics import GradientStatistics
from gossamer.plan.profile.profile_runs import profile_with_gradients
from gossamer.plan.simulate import ForecastClock, NetworkSchedule, SimulatedJob, StepTimes

# -- a script, checked -------------------------------------------------------------------------------------------------


STEPS = 4
SAME = 1e-4  # relative; sums in another order differ by less
NOT_REPEATED = (
    "two runs of the script with one recipe and the same arguments logged different losses, {first:.6g} and "
    "{second:.6g} in step {step}: it uses unseeded random numbers. Differences between recipes then include chance, "
    "which the intervals ignore. Write torch.manual_seed(0) before the model is made, and "
    "world.shard(..., seed=0) for the data"
)


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Facts from a few steps. step_seconds: of this machine, for one step of all workers in turn."""

    model: Attached
    optimizer_type: type[Optimizer]
    step_seconds: float
    remark: str | None  # if the script is not deterministic
    batch: int = 1  # samples of a batch: the first dimension of the model's first input; 1 if it has none


class _UnitClock:
    """A clock with one second per step for every recipe."""

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        return StepTimes(seconds=1.0)


def check_script(script: Path, arguments: Sequence[str], workers: int, target_metric: str | None = None) -> ScriptFacts:
    """Run a few steps. Raises RaceError for a script that fails, ends at once, or logs no loss."""
    models: list[Attached] = []
    optimizers: list[type[Optimizer]] = []
    batches: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, Attached):
            models.append(event)

    def step(optimizer: Optimizer, *_: object) -> None:
        optimizers.append(type(optimizer))

    def forward(module: Module, inputs: tuple[Any, ...]) -> None:
        if not batches and module.training and inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim:
            batches.append(len(inputs[0]))

    unsubscribe = subscribe(listener)
    hooks = register_optimizer_step_pre_hook(uncompiled(step)), register_module_forward_pre_hook(forward)
    try:
        seconds, first = _few_steps(script, arguments, workers)
        _, second = _few_steps(script, arguments, workers)
    finally:
        unsubscribe()
        for hook in hooks:
            hook.remove()
    if not models or not optimizers:
        raise RaceError(f"{script} made no optimizer step, so recipes cannot be compared")
    if not any(first.get(name) for name in (*LOSSES, target_metric or "")):
        raise RaceError(NO_LOSS)
    return ScriptFacts(
        model=models[0],
        optimizer_type=optimizers[0],
        step_seconds=seconds,
        remark=difference(first, second),
        batch=max([1, *batches]),
    )


def _few_steps(script: Path, arguments: Sequence[str], workers: int) -> tuple[float, Mapping[str, Sequence[Point]]]:
    """Seconds per step on this machine, without the first one, and the logged metrics."""
    job = SimulatedJob(script, arguments, "Dense()", workers, clock=_UnitClock())
    try:
        job.advance(steps=1)
        began = time.monotonic()
        progress = job.advance(steps=STEPS)
        seconds = (time.monotonic() - began) / max(1, progress.steps - 1)
    finally:
        job.close()
    if progress.failure is not None:
        raise RaceError(f"{script} fails with Dense(), the baseline: {progress.failure}")
    return seconds, progress.metrics


def difference(first: Mapping[str, Sequence[Point]], second: Mapping[str, Sequence[Point]]) -> str | None:
    """Remark on two runs that should have logged the same losses; None if they did."""
    for name in LOSSES:
        for (step, _, value), (_, _, again) in zip(first.get(name, ()), second.get(name, ()), strict=False):
            if not isclose(value, again, rel_tol=SAME):
                return NOT_REPEATED.format(first=value, second=again, step=step)
    return None


# -- whole advice ------------------------------------------------------------------------------------------------------


def whole_advice(
    race: RaceResult,
    answer: Answer,
    setting: Setting,
    *,
    candidates: Sequence[CandidateRow] = (),
    compute_seconds: float = 0.0,
    gradients: Mapping[str, float | None] | None = None,
    findings: Sequence[GradientFinding] = (),
    confirmed: Sequence[ConfirmedRow] = (),
) -> Advice:
    """Assemble the advice. candidates: in order of expectation. compute_seconds: of a step without communication."""
    return Advice(
        recipe=answer.recipe,
        learning_rate_factor=answer.learning_rate_factor,
        change=answer.change,
        use=answer.use,
        gain=answer.gain,
        cost=answer.cost,
        command=written(answer.command),
        script=written(setting.script),
        arguments=tuple(map(written, setting.arguments)),
        workers=setting.workers,
        network=setting.network,
        speeds=setting.speeds,
        target=str(setting.target) if setting.target else None,
        compute_seconds=compute_seconds,
        metric=race.metric,
        race_seconds=race.seconds,
        confidence=race.confidence,
        candidates=tuple(candidates),
        contenders=tuple(_contender_row(each, race, setting.target) for each in race.contenders),
        rungs=tuple(RungRow(seconds=each.seconds, names=each.names, out=each.out) for each in race.rungs),
        would_change=answer.would_change,
        remarks=answer.remarks,
        gradients=dict(gradients or {}),
        findings=tuple(FindingRow(**asdict(each)) for each in findings),
        confirmed=tuple(confirmed),
    )


def _contender_row(contender: Contender, race: RaceResult, target: Target | None) -> ContenderRow:
    against = contender.against
    curve = contender.curve(race.metric).thinned(MOST_POINTS)
    return ContenderRow(
        recipe=contender.recipe,
        learning_rate_factor=contender.learning_rate_factor,
        steps=contender.steps,
        seconds=contender.seconds,
        bytes_sent=contender.bytes_sent,
        loss=race.last_loss(contender),
        curve=tuple((float(step), at, value) for step, at, value in curve.points),
        out=None if contender.out is None else written(contender.out),
        speedup=_range(against.speedup) if against else None,
        loss_at_equal_steps=_range(against.loss_at_equal_steps) if against else None,
        loss_at_equal_seconds=_range(against.loss_at_equal_seconds) if against else None,
        seconds_to_target=seconds_to(contender.curve(target.metric), target) if target else None,
    )


def _range(interval: ConfidenceInterval) -> Range:
    value, low, high = (each if isfinite(each) else None for each in (interval.value, interval.low, interval.high))
    return value, low, high


DENSE = "Dense()"

# -- the stages --------------------------------------------------------------------------------------------------------

ShowText = Callable[[str], None]


@dataclass(kw_only=True)
class Advisor:
    """The stages, in order: `check`, `profile`, `estimate_all`, `race`, `advice`. Each uses results of earlier ones.

    Args:
        setting: script, arguments, workers and network of the request.
        network: to advise for.
        copies: number of workers that share this machine.
        budget_seconds: wall time of the race.
        most_steps: limit of the race, in steps of all workers together.
        most: maximum of recipes in the race, in addition to Dense().
        `print_text`: called with the current activity.
    """

    setting: Setting
    network: Network
    copies: int = 1
    budget_seconds: float = 600.0
    most_steps: float = inf
    most: int = 16
    print_text: ShowText = lambda sentence: None
    facts: ScriptFacts = field(init=False)
    measured: WorkloadProfile = field(init=False)
    pricer: StepPricer = field(init=False)  # from the measured step
    statistics: GradientStatistics | None = field(init=False, default=None)
    predicted: Sequence[Prediction] = field(init=False, default=())  # Dense(), recipes to race, excluded ones
    result: RaceResult = field(init=False)

    def check(self) -> ScriptFacts:
        """Run a few steps. Raises RaceError if recipes cannot be compared within the budget."""
        target = self.setting.target.metric if self.setting.target else None
        self.facts = check_script(Path(self.setting.script), self.setting.arguments, self.setting.workers, target)
        self.most = min(self.most, affordable(self.budget_seconds, self.facts.step_seconds))
        return self.facts

    def profile(self) -> WorkloadProfile:
        """Measure the compute time of a step, and statistics of its gradients."""
        measured, self.statistics = profile_with_gradients(
            Path(self.setting.script), self.setting.arguments, self.setting.workers, self.copies
        )
        self.measured = replace(measured, speeds=self.setting.speeds)
        self.pricer = StepPricer(self.measured, self.setting.workers)
        return self.measured

    def estimate_all(self) -> Sequence[Prediction]:
        """Estimate all candidates; those to race come first."""
        found = candidates(
            *(self.facts.model, self.facts.optimizer_type, self.statistics, self.setting.workers, self.network),
            speeds=self.setting.speeds,
            batch=self.facts.batch,
        )
        priced = estimate_all(
            *(found, self.measured, self.network, self.setting.workers),
            lambda done, of, recipe: self.print_text(f"estimating {done} of {of}: {recipe}"),
            pricer=self.pricer,
        )
        self.predicted = judged(priced, self.statistics, self.most + 1)
        return self.predicted

    def race(self) -> RaceResult:
        """Race the remaining candidates against Dense()."""
        clock = ForecastClock(self.pricer.profile, NetworkSchedule(((0.0, self.network),)), self.setting.workers)

        def start(recipe: str, factor: float) -> RaceJob:
            self.print_text(f"starting {recipe}")
            return SimulatedJob(
                Path(self.setting.script),
                self.setting.arguments,
                recipe,
                self.setting.workers,
                clock=clock,
                learning_rate_factor=factor,
            )

        left = [each.recipe for each in self.predicted if each.excluded is None]
        self.result = Race(
            start=start,
            baseline=DENSE,
            challengers=[recipe for recipe in left if recipe != DENSE],
            budget_seconds=self.budget_seconds,
            most_steps=self.most_steps,
            target=self.setting.target,
            print_text=self.print_text,
        ).run()
        return self.result

    def advice(self, remarks: Sequence[str] = ()) -> Advice:
        """The advice from all stages. remarks: to be added to it."""
        notes = [*remarks, *([self.facts.remark] if self.facts.remark else []), *statistics_remarks(self.statistics)]
        found = answer(self.result, self.setting, self._thresholds(), notes)
        return whole_advice(
            self.result,
            found,
            self.setting,
            candidates=[_row(each) for each in self.predicted],
            compute_seconds=self.measured.compute_seconds,
            gradients=_numbers(self.statistics),
            findings=findings(self.statistics, self.setting.workers) if self.statistics else (),
        )

    def _thresholds(self) -> list[LeadRange]:
        """Lead ranges from the measured steps ratios of the finalists, or from priors if too few were measured."""
        ratios = {
            each.recipe: each.against.steps_ratio
            for each in reversed(self.result.contenders)
            if each.out is None and each.against is not None and each.recipe != DENSE
        }
        ratios[DENSE] = 1.0
        finalists = [each for each in self.predicted if each.recipe in ratios]
        seen = [ratios[each.recipe] for each in finalists]
        expected = [
            ratio if isfinite(ratio) else each.expected_steps for ratio, each in zip(seen, finalists, strict=True)
        ]
        return thresholds(finalists, self.pricer, self.network, expected_steps=expected)


def affordable(budget_seconds: float, step_seconds: float) -> int:
    """Number of recipes that can race in addition to Dense(). Raises RaceError if the budget is too small for one."""
    count = int(budget_seconds / (FEWEST_STEPS * step_seconds)) - 1
    if count < 1:
        needed = 2 * FEWEST_STEPS * step_seconds
        raise RaceError(
            f"a step of all workers takes {seconds_text(step_seconds)} on this machine, so the race cannot compare "
            f"recipes within {seconds_text(budget_seconds)}. Write --minutes {ceil(needed / 60)} or more, pass the "
            "script arguments of a smaller model, or compare step times only: "
            "gossamer explain --network SPEC RECIPE SCRIPT"
        )
    return count


def top(result: RaceResult, count: int) -> list[Contender]:
    """The best finalists with the script's own learning rate, including Dense()."""
    left = [each for each in result.contenders[1:] if each.out is None and each.learning_rate_factor == 1]
    return [*left[: count - 1], result.baseline]


def _row(found: Prediction) -> CandidateRow:
    return CandidateRow(
        recipe=found.recipe,
        step_seconds=found.step_seconds,
        step_seconds_low=found.interval.low_seconds if found.interval else None,
        step_seconds_high=found.interval.high_seconds if found.interval else None,
        bytes_sent=found.bytes_sent,
        memory_bytes=found.memory_bytes,
        expected_steps=found.expected_steps,
        excluded=None if found.excluded is None else written(found.excluded),
    )


def statistics_remarks(statistics: GradientStatistics | None) -> Iterator[str]:
    """What the statistics of the gradients leave out, and why."""
    if statistics is None:
        yield (
            "there are no gradient statistics, so no recipe was excluded because of them: no observed batch had "
            "finite gradients. Check the learning rate and the loss scale of the script"
        )
    elif statistics.skipped_batches:
        seen = statistics.batches + statistics.skipped_batches
        yield (
            f"the gradient statistics leave out {statistics.skipped_batches} of {seen} batches, because their "
            "gradients contain NaN or infinity"
        )


def _numbers(statistics: GradientStatistics | None) -> Mapping[str, float | None]:
    """Statistics that are single numbers, by name."""
    if statistics is None:
        return {}
    expected = {**statistics.to_json(), "noise_scale_batches": statistics.noise_scale_batches}
    return {
        name: float(value) if value is not None and isfinite(value) else None
        for name, value in expected.items()
        if value is None or isinstance(value, int | float)
    }
