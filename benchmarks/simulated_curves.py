"""Simulated curves: validation losses of tasks by recipe and step, trained once a seed: no network changes them."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.plan.advise.prices import StepPricer
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.profile.profile_runs import profile_script
from gossamer.plan.simulate import JobProgress, SimulatedJob, StepTimes

SCRIPT = ROOT / "benchmarks" / "task_script.py"

Curve = Sequence[tuple[float, float]]  # (steps or virtual seconds, validation loss)


class StepsAsSeconds:
    """A clock that counts steps."""

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        return StepTimes(seconds=1.0)


def curve_of(progress: JobProgress) -> Curve:
    """(virtual seconds, validation loss), as far as training went."""
    return [(seconds, loss) for _, seconds, loss in progress.metrics.get("validation_loss", [])]


def at_pace(profile: WorkloadProfile, factor: float) -> WorkloadProfile:
    """A worker whose steps compute so many times as long; what codecs take is the same."""
    return replace(
        profile,
        backward_seconds=factor * profile.backward_seconds,
        rest_seconds=factor * profile.rest_seconds,
        buckets=[replace(each, ready_seconds=factor * each.ready_seconds) for each in profile.buckets],
    )


class Kept:
    """What was found, by name; written to a file at once, so that a stopped program goes on where it was."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What was found before, or is found now."""
        if name not in self._found:
            print(f"{len(self._found):4} {name}", file=sys.stderr, flush=True)
            self._found[name] = find()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(self._found))
            part.replace(self._file)
        return self._found[name]


@dataclass
class SimulatedCurves:
    """Curves of one seed by task and recipe, and profiles, which are the same for every seed."""

    kept: Kept
    workers: int
    steps: int
    seed: int
    evaluate_every: int
    step_seconds: Mapping[str, float] = field(default_factory=dict)  # of computing, by task; else as it is measured
    pricers: dict[str, StepPricer] = field(default_factory=dict, init=False)

    def arguments(self, task: str, steps: int | None = None) -> list[str]:
        numbers = {"--steps": steps or self.steps, "--evaluate-every": self.evaluate_every, "--seed": self.seed}
        return [task, *(part for name, value in numbers.items() for part in (name, str(value)))]

    def by_steps(self, task: str, recipe: str, steps: int | None = None, rate_factor: float = 1.0) -> Curve:
        """steps: where they are others than usual. rate_factor: of the learning rate."""

        def train() -> Curve:
            given = self.arguments(task, steps)
            clock = StepsAsSeconds()
            job = SimulatedJob(SCRIPT, given, recipe, self.workers, clock=clock, learning_rate_factor=rate_factor)
            try:
                return curve_of(job.advance())
            finally:
                job.close()

        name = recipe if steps is None else f"{recipe} for {steps} steps"
        name += f" at {rate_factor:g} times the rate" * (rate_factor != 1.0)
        return [(step, loss) for step, loss in self.once("curve", task, name, train)]

    def pricer(self, task: str) -> StepPricer:
        """For any recipe, by one profile of the task: of one worker on a machine of its own."""

        def measure() -> dict[str, Any]:
            return profile_script(SCRIPT, self.arguments(task), resolve(None), self.workers).to_json()

        if task not in self.pricers:
            profile = WorkloadProfile.from_json(self.once("profile", task, repr(resolve(None)), measure))
            self.pricers[task] = StepPricer(self.paced(task, profile), self.workers)
        return self.pricers[task]

    def paced(self, task: str, profile: WorkloadProfile) -> WorkloadProfile:
        """As long as `step_seconds` says that the task computes."""
        return at_pace(profile, self.step_seconds.get(task, profile.compute_seconds) / profile.compute_seconds)

    def profile(self, task: str, recipe: Recipe) -> WorkloadProfile:
        """Codecs are timed once and kept, so that a page can be written again from what was measured for it."""
        found = self.once("priced", task, repr(recipe), lambda: self.pricer(task).profile(recipe).to_json())
        return WorkloadProfile.from_json(found)

    def once(self, what: str, task: str, name: str, find: Callable[[], Any]) -> Any:
        """What was found before for this seed, or is found now."""
        key = f"{what} {task} steps={self.steps} seed={self.seed} workers={self.workers} {name}"
        return self.kept.once(key, find)
