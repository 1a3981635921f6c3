"""Step clock: says how long a step of a recipe takes at a moment of virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.ops import AllGather
from gossamer.comm.network import Network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.plan.cost.step_time import NOT_PREDICTABLE, estimate_step_time, is_predictable
from gossamer.plan.cost.workload_profile import WorkloadProfile
from gossamer.plan.simulate.network_schedule import NetworkSchedule
from gossamer.plan.simulate.script_guards import SimulationError
from gossamer.train.traffic.traffic import estimate_traffic

TEXT_BYTES = (8, 512)  # a length, and a text of usual length


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step in the long run, means over workers. Seconds are virtual."""

    seconds: float
    waiting_seconds: float = 0.0  # the training thread's, for the communication thread
    wire_seconds: float = 0.0  # of the communication thread, hidden behind computing or not
    codec_seconds: float = 0.0  # likewise
    bytes_sent: float = 0.0  # payload
    exchange_seconds: float = 0.0  # of a short text from each worker to all others, between two steps


class StepClock(Protocol):
    """Tells the time of a simulated job."""

    def step(self, recipe: Recipe, at: float) -> StepTimes:
        """A step that begins at virtual second `at`. Raises GossamerError where that cannot be told."""


class ForecastClock:
    """A steady step as it is foretold for the network in force when it begins.

    profile: measures what one worker does in a step of a recipe, once for each recipe.
    """

    def __init__(self, profile: Callable[[Recipe], WorkloadProfile], network: NetworkSchedule, workers: int) -> None:
        self._profile, self._network, self._workers = profile, network, workers
        self._profiles: dict[str, WorkloadProfile] = {}
        self._steps: dict[tuple[str, str], StepTimes] = {}

    def step(self, recipe: Recipe, at: float) -> StepTimes:
        network = self._network.at(at)
        key = repr(recipe), network.text
        if key not in self._steps:
            self._steps[key] = self._foretold(recipe, network)
        return self._steps[key]

    def profile(self, recipe: Recipe) -> WorkloadProfile:
        """What one worker does in a step of this recipe, without a network."""
        if repr(recipe) not in self._profiles:
            self._profiles[repr(recipe)] = self._profile(recipe)
        return self._profiles[repr(recipe)]

    def _foretold(self, recipe: Recipe, network: Network) -> StepTimes:
        refuse_unpredictable(recipe)
        measured = self.profile(recipe)
        found = estimate_step_time(recipe, measured, network, self._workers)
        return StepTimes(
            seconds=found.step_seconds,
            waiting_seconds=found.waiting_seconds,
            wire_seconds=found.wire_seconds,
            codec_seconds=found.codec_seconds,
            bytes_sent=estimate_traffic(recipe, measured.model, workers=self._workers).bytes_sent,
            exchange_seconds=self._exchange_seconds(network),
        )

    def _exchange_seconds(self, network: Network) -> float:
        """First all tell how long their texts are, then the texts."""
        if self._workers == 1:
            return 0.0
        there = replace(network, hosts=network.hosts[: self._workers])
        return sum(seconds(AllGather((torch.empty(size // 4, device="meta"),)), there) for size in TEXT_BYTES)


def refuse_unpredictable(recipe: Recipe) -> None:
    """Raise SimulationError where workers do not make their steps together."""
    if not is_predictable(recipe):
        raise SimulationError(f"{recipe} cannot be simulated: {NOT_PREDICTABLE}")
