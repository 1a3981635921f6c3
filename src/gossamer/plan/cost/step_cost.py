"""Step cost: one row of a cost table, for a recipe, so many workers and a network, before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.comm.network import Network
from gossamer.events import Attached
from gossamer.plan.cost.machine_load import MachineLoad, machine_load, seconds_on_the_line
from gossamer.plan.cost.step_time import estimate_step_time, is_predictable
from gossamer.plan.cost.workload_profile import WorkloadProfile
from gossamer.train.traffic.traffic import estimate_traffic


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes and seconds of a step in the long run."""

    recipe: str
    workers: int
    bytes_sent: float  # per worker and step, mean over workers
    load: MachineLoad
    seconds: float  # of a step
    waiting_share: float  # of it
    codec_seconds: float  # of the communication thread, compressing and decoding
    at_least: bool  # whether `seconds` is a lower bound, from computing and the busiest machine's line
    residual_bytes: int  # that a worker keeps between steps


def step_cost(
    recipe: Recipe,
    model: Attached,
    network: Network,
    workers: int,
    step_seconds: float,
    profile: Callable[[], WorkloadProfile],
) -> StepCost:
    """Bytes and the busiest machine are exact; seconds are foretold where workers move in step, else a lower bound.

    profile: asked only where seconds can be foretold. Raises NetworkError for more unequal hosts than can be played.
    """
    traffic = estimate_traffic(recipe, model, workers=workers)
    load = machine_load(recipe, model, traffic, network)
    if is_predictable(recipe):
        found = estimate_step_time(recipe, profile(), network, workers)
        seconds, share, codec = found.step_seconds, found.waiting_share, found.codec_seconds
    else:
        line = seconds_on_the_line(load, network)
        seconds, codec = max(step_seconds, line), 0.0
        share = 1 - step_seconds / seconds
    return StepCost(
        recipe=repr(recipe),
        workers=workers,
        bytes_sent=traffic.bytes_sent,
        load=load,
        seconds=seconds,
        waiting_share=share,
        codec_seconds=codec,
        at_least=not is_predictable(recipe),
        residual_bytes=traffic.residual_bytes + traffic.other_state_bytes + traffic.strategy_bytes,
    )
