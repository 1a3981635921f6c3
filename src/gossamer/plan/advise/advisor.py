"""Advisor: profiles a script, foretells every candidate's step, races the best of them, and says what to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from pathlib import Path

from gossamer.base.units import seconds_text
from gossamer.comm.network import Network
from gossamer.plan.advise.advice_file import Advice, CandidateRow
from gossamer.plan.advise.answer import Setting, answer
from gossamer.plan.advise.pricing.candidates import candidates
from gossamer.plan.advise.pricing.foretell import Foretold, foretell
from gossamer.plan.advise.pricing.gradient_findings import findings
from gossamer.plan.advise.pricing.pruning import judged
from gossamer.plan.advise.pricing.step_pricing import StepPricer
from gossamer.plan.advise.pricing.thresholds import LeadRange, thresholds
from gossamer.plan.advise.racing.contender import Contender, RaceJob
from gossamer.plan.advise.racing.race import FEWEST_STEPS, Race, RaceError, RaceResult
from gossamer.plan.advise.script_check import ScriptFacts, check_script
from gossamer.plan.advise.whole_advice import whole_advice
from gossamer.plan.cost.workload_profile import WorkloadProfile
from gossamer.plan.profile.gradient_statistics import GradientStatistics
from gossamer.plan.profile.profile_runs import profile_with_gradients
from gossamer.plan.simulate import ForecastClock, NetworkSchedule, SimulatedJob

DENSE = "Dense()"

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Advisor:
    """The stages, in order: `check`, `profile`, `foretell`, `race`, `advice`; each stands on what those before found.

    copies: how many workers share this machine. budget_seconds, most_steps: what the race may take, the latter of all
    workers' steps together. most: recipes to race beside Dense(). say: hears what is being done.
    """

    setting: Setting
    network: Network
    copies: int = 1
    budget_seconds: float = 600.0
    most_steps: float = inf
    most: int = 16
    say: Say = lambda sentence: None
    facts: ScriptFacts = field(init=False)
    measured: WorkloadProfile = field(init=False)
    pricer: StepPricer = field(init=False)  # of steps like the one that was measured
    statistics: GradientStatistics | None = field(init=False, default=None)
    foretold: Sequence[Foretold] = field(init=False, default=())  # Dense(), others to race, then those left out
    result: RaceResult = field(init=False)

    def check(self) -> ScriptFacts:
        """A few steps. Raises RaceError for a script whose recipes cannot be compared within the budget."""
        target = self.setting.target.metric if self.setting.target else None
        self.facts = check_script(Path(self.setting.script), self.setting.arguments, self.setting.workers, target)
        self.most = min(self.most, affordable(self.budget_seconds, self.facts.step_seconds))
        return self.facts

    def profile(self) -> WorkloadProfile:
        """A step's computing, and how its gradients are made."""
        self.measured, self.statistics = profile_with_gradients(
            Path(self.setting.script), self.setting.arguments, self.setting.workers, self.copies
        )
        self.pricer = StepPricer(self.measured, self.setting.workers)
        return self.measured

    def foretell(self) -> Sequence[Foretold]:
        """All candidates, those to race first."""
        found = candidates(
            self.facts.model, self.facts.optimizer_type, self.statistics, self.setting.workers, self.network
        )
        priced = foretell(
            *(found, self.measured, self.network, self.setting.workers),
            lambda done, of, recipe: self.say(f"foretelling {done} of {of}: {recipe}"),
            pricer=self.pricer,
        )
        self.foretold = judged(priced, self.statistics, self.most + 1)
        return self.foretold

    def race(self) -> RaceResult:
        """Those that are left, against Dense()."""
        clock = ForecastClock(self.pricer.profile, NetworkSchedule(((0.0, self.network),)), self.setting.workers)

        def start(recipe: str, factor: float) -> RaceJob:
            self.say(f"starting {recipe}")
            return SimulatedJob(
                Path(self.setting.script),
                self.setting.arguments,
                recipe,
                self.setting.workers,
                clock=clock,
                learning_rate_factor=factor,
            )

        left = [each.recipe for each in self.foretold if each.excluded is None]
        self.result = Race(
            start=start,
            baseline=DENSE,
            challengers=[recipe for recipe in left if recipe != DENSE],
            budget_seconds=self.budget_seconds,
            most_steps=self.most_steps,
            target=self.setting.target,
            say=self.say,
        ).run()
        return self.result

    def advice(self, remarks: Sequence[str] = ()) -> Advice:
        """What all of it says. remarks: what else is to be known."""
        said = [*remarks, *([self.facts.remark] if self.facts.remark else [])]
        found = answer(self.result, self.setting, self._thresholds(), said)
        return whole_advice(
            self.result,
            found,
            self.setting,
            candidates=[_row(each) for each in self.foretold],
            compute_seconds=self.measured.compute_seconds,
            gradients=_numbers(self.statistics),
            findings=findings(self.statistics, self.setting.workers) if self.statistics else (),
        )

    def _thresholds(self) -> list[LeadRange]:
        """By the steps that the race has seen of those that went to its end, or by the prior where it saw too few."""
        ratios = {
            each.recipe: each.against.steps_ratio
            for each in reversed(self.result.contenders)
            if each.out is None and each.against is not None and each.recipe != DENSE
        }
        ratios[DENSE] = 1.0
        finalists = [each for each in self.foretold if each.recipe in ratios]
        seen = [ratios[each.recipe] for each in finalists]
        told = [ratio if isfinite(ratio) else each.expected_steps for ratio, each in zip(seen, finalists, strict=True)]
        return thresholds(finalists, self.pricer, self.network, expected_steps=told)


def affordable(budget_seconds: float, step_seconds: float) -> int:
    """How many recipes may race beside Dense(). Raises RaceError where the budget is too small for one."""
    count = int(budget_seconds / (FEWEST_STEPS * step_seconds)) - 1
    if count < 1:
        needed = 2 * FEWEST_STEPS * step_seconds
        raise RaceError(
            f"all workers together take {seconds_text(step_seconds)} for a step here, so nothing could be told of any "
            f"recipe within {seconds_text(budget_seconds)}. Write --minutes {ceil(needed / 60)} or more, give the "
            "script arguments for a smaller model, or compare step times alone: "
            "gossamer explain --network SPEC RECIPE SCRIPT"
        )
    return count


def top(result: RaceResult, count: int) -> list[Contender]:
    """The best that went to the end at the script's own learning rate, with Dense() among them."""
    left = [each for each in result.contenders[1:] if each.out is None and each.learning_rate_factor == 1]
    return [*left[: count - 1], result.baseline]


def _row(found: Foretold) -> CandidateRow:
    return CandidateRow(
        recipe=found.recipe,
        step_seconds=found.step_seconds,
        step_seconds_low=found.interval.low_seconds if found.interval else None,
        step_seconds_high=found.interval.high_seconds if found.interval else None,
        bytes_sent=found.bytes_sent,
        memory_bytes=found.memory_bytes,
        expected_steps=found.expected_steps,
        excluded=found.excluded,
    )


def _numbers(statistics: GradientStatistics | None) -> Mapping[str, float | None]:
    """What is one number, by name."""
    if statistics is None:
        return {}
    told = {**statistics.to_json(), "noise_scale_batches": statistics.noise_scale_batches}
    return {
        name: float(value) if value is not None and isfinite(value) else None
        for name, value in told.items()
        if value is None or isinstance(value, int | float)
    }
