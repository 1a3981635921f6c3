"""Script check: trains a few steps twice, which tells whether a script logs a loss and repeats itself from its seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.events import Attached, Event, subscribe
from gossamer.plan.advise.racing.contender import LOSSES
from gossamer.plan.advise.racing.loss_curve import Point
from gossamer.plan.advise.racing.race import NO_LOSS, RaceError
from gossamer.plan.simulate import SimulatedJob, StepTimes

STEPS = 4
SAME = 1e-4  # of a loss: sums in another order differ by less
NOT_REPEATED = (
    "two runs of the script with one recipe and the same arguments log other losses, {first:.6g} and {second:.6g} in "
    "step {step}: it draws without a seed. Recipes then differ by chance, too, and the intervals do not know of it. "
    "Write torch.manual_seed(0) before the model is made, and draw data by world.shard(..., seed=0)"
)


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What a few steps tell. step_seconds: of this machine, for one step of all workers, one after the other."""

    model: Attached
    optimizer_type: type[Optimizer]
    step_seconds: float
    remark: str | None  # where the script does not repeat itself


class _UnitClock:
    """A second a step, whatever the recipe."""

    def step(self, recipe: Recipe, at: float) -> StepTimes:
        return StepTimes(seconds=1.0)


def check_script(script: Path, arguments: Sequence[str], workers: int, target_metric: str | None = None) -> ScriptFacts:
    """Raises RaceError for a script that fails, ends at once, or logs nothing that could be compared."""
    models: list[Attached] = []
    optimizers: list[type[Optimizer]] = []

    def hear(event: Event) -> None:
        if isinstance(event, Attached):
            models.append(event)

    def step(optimizer: Optimizer, *_: object) -> None:
        optimizers.append(type(optimizer))

    unsubscribe, hook = subscribe(hear), register_optimizer_step_pre_hook(step)
    try:
        seconds, first = _few_steps(script, arguments, workers)
        _, second = _few_steps(script, arguments, workers)
    finally:
        unsubscribe()
        hook.remove()
    if not models or not optimizers:
        raise RaceError(f"{script} made no step by an optimizer, so there is nothing to compare recipes by")
    if not any(first.get(name) for name in (*LOSSES, target_metric or "")):
        raise RaceError(NO_LOSS)
    return ScriptFacts(
        model=models[0], optimizer_type=optimizers[0], step_seconds=seconds, remark=difference(first, second)
    )


def _few_steps(script: Path, arguments: Sequence[str], workers: int) -> tuple[float, Mapping[str, Sequence[Point]]]:
    """Seconds of this machine a step, the first one left out, and what was logged."""
    job = SimulatedJob(script, arguments, "Dense()", workers, clock=_UnitClock())
    try:
        job.advance(steps=1)
        began = time.monotonic()
        progress = job.advance(steps=STEPS)
        seconds = (time.monotonic() - began) / max(1, progress.steps - 1)
    finally:
        job.close()
    if progress.failure is not None:
        raise RaceError(f"{script} fails with Dense(), so there is nothing to compare with: {progress.failure}")
    return seconds, progress.metrics


def difference(first: Mapping[str, Sequence[Point]], second: Mapping[str, Sequence[Point]]) -> str | None:
    """What to say of two runs that should have logged the same; None where they did."""
    for name in LOSSES:
        for (step, _, value), (_, _, again) in zip(first.get(name, ()), second.get(name, ()), strict=False):
            if not isclose(value, again, rel_tol=SAME):
                return NOT_REPEATED.format(first=value, second=again, step=step)
    return None
