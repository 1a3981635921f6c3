"""Foretelling: seconds, bytes and memory of every candidate's step on a network, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import Network
from gossamer.errors import GossamerError
from gossamer.plan.advise.pricing.candidates import Candidate
from gossamer.plan.advise.pricing.step_pricing import StepPricer
from gossamer.plan.cost.calibration import ForecastInterval
from gossamer.plan.cost.workload_profile import WorkloadProfile


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """What is expected of a recipe. Seconds and bytes are of one step of the optimizer, on average over a period."""

    recipe: str  # as one would write it
    step_seconds: float = 0.0
    interval: ForecastInterval | None = None  # in which step_seconds will lie when it is measured
    bytes_sent: float = 0.0  # by a worker
    memory_bytes: int = 0  # kept between steps beside the model and its optimizer, by a worker
    passes: int = 1  # backward passes of a worker in a step, of as many batches
    rounds: float = 0.0  # in which workers hear of each other, for a backward pass
    strategy_passes: float = 1.0  # backward passes to a loss over Dense()'s: a prior, that a race corrects
    compressor_passes: float = 1.0  # likewise, and both multiply
    source: str = ""  # of these two
    excluded: str | None = None  # why it is left out; step_seconds is then 0 where nothing was priced

    @property
    def pass_seconds(self) -> float:
        """Seconds for each batch of a worker, by which recipes compare that make another number of them a step."""
        return self.step_seconds / self.passes

    @property
    def expected_passes(self) -> float:
        """Backward passes to a loss, over Dense()'s."""
        return self.strategy_passes * self.compressor_passes

    @property
    def expected_steps(self) -> float:
        """Steps of the optimizer to a loss, over Dense()'s, each of which is one backward pass."""
        return self.expected_passes / self.passes

    @property
    def expected_seconds(self) -> float:
        """Seconds to a loss for which Dense() needs one step: what candidates are ordered by."""
        return self.step_seconds * self.expected_steps


Progress = Callable[[int, int, str], None]  # how many candidates are priced, of how many, which is the next


def _say_nothing(done: int, of: int, recipe: str) -> None:
    """Nobody waits for it."""


def foretell(
    candidates: Sequence[Candidate],
    profile: WorkloadProfile,
    network: Network,
    workers: int,
    on_progress: Progress = _say_nothing,
    *,
    pricer: StepPricer | None = None,
) -> list[Foretold]:
    """Price every candidate, in their order; what is excluded stays, unpriced.

    profile: of the script with `resolve(None)`, lock step and nothing compressed: all others' follow from it and from
    codecs that are timed here. pricer: one for this profile, whose timings are used again.
    """
    pricer = pricer or StepPricer(profile, workers)
    found: list[Foretold] = []
    for done, candidate in enumerate(candidates):
        on_progress(done, len(candidates), candidate.recipe)
        known = Foretold(
            recipe=candidate.recipe,
            strategy_passes=candidate.strategy_passes,
            compressor_passes=candidate.compressor_passes,
            source=candidate.source,
            excluded=candidate.excluded,
        )
        found.append(known if known.excluded else _priced(known, pricer, network))
    return found


def _priced(known: Foretold, pricer: StepPricer, network: Network) -> Foretold:
    recipe = resolve(known.recipe, pricer.workers)
    try:
        step, traffic = pricer.step_time(recipe, network), pricer.traffic(recipe)
    except GossamerError as error:
        return replace(known, excluded=f"it could not be priced: {error}")
    schedule = recipe.strategy.steady_stage.schedule
    operations = max((len(bucket) for bucket in traffic.buckets), default=0)
    return replace(
        known,
        step_seconds=step.step_seconds,
        interval=step.interval,
        bytes_sent=traffic.bytes_sent,
        memory_bytes=traffic.memory_bytes,
        passes=traffic.passes // traffic.steps,
        rounds=operations * len(schedule.period_rounds) / schedule.period,
    )
