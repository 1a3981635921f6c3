"""How long a step will take on a network: what was measured here, and what its words cost there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from gossamer.core.layout import Layout, dtype_of
from gossamer.core.ops import AllGather, AllReduceMean, CollectiveOp, NeighborAllGather
from gossamer.errors import GossamerError
from gossamer.estimate.op_trace import trace_ops
from gossamer.estimate.schedule_simulator import STEPS_UNTIL_STEADY, PerStep, Trip, run_sites, run_turns
from gossamer.estimate.step_simulator import BucketJob, run_step
from gossamer.estimate.traffic import mean_neighbors, neighbor_payload
from gossamer.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.network import Network
from gossamer.network.cost.op_cost import NetworkCost
from gossamer.network.tcp_model import ETHERNET, Tcp
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.participation import POLL_BYTES
from gossamer.runtime.pipeline import DEPTH
from gossamer.strategies import Stage
from gossamer.strategies.base import schedule_of
from gossamer.synchronizers.stages import site_size
from gossamer.transports.mesh.collective_selector import check_wish, requested_collective

NOT_PREDICTABLE = (
    "how long a step takes is not foretold where workers do not wait for each other: try it by gossamer run"
)


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of one step in the long run, means over workers; `inputs`: the numbers it follows from.

    waiting: the training thread's, for the lane; wire and codec: on the lane, hidden or not.
    """

    step_seconds: float
    waiting_seconds: float
    wire_seconds: float
    codec_seconds: float
    inputs: Mapping[str, Any]

    @property
    def waiting_share(self) -> float:
        return self.waiting_seconds / self.step_seconds


def is_predictable(recipe: Recipe) -> bool:
    """Whether workers of this recipe make their steps together. What others do in a second, only a trial can tell."""
    stage = recipe.strategy.stages[-1]
    return stage.serving is None and (stage.mixing is None or stage.mixing.in_lock_step)


def estimate_step_time(
    recipe: Recipe, measured: WorkloadProfile, network: Network, workers: int, tcp: Tcp = ETHERNET
) -> StepTimeEstimate:
    """What a step of `recipe` takes when `workers` that were measured talk over `network`, once it is under way.

    A step is an exchange of gradients, or a backward pass where parameters are averaged: then on average over a period.
    tcp: how packets are cut; by default as on an Ethernet.
    """
    there = replace(network, hosts=network.hosts[:workers])
    collective = wish_of(recipe)
    found = _per_step(recipe, measured, there, workers, tcp, collective)
    return StepTimeEstimate(
        step_seconds=found.seconds,
        waiting_seconds=found.waiting,
        wire_seconds=found.wire,
        codec_seconds=found.codec,
        inputs={
            "network": network.text,
            "workers": workers,
            "collective": collective,
            "compute_seconds": measured.compute_seconds,
            "codec_seconds": sum(sum(bucket.computing_seconds) for bucket in measured.buckets),
            "engine_seconds": sum(sum(bucket.engine_seconds) for bucket in measured.buckets),
            "buckets": len(measured.buckets),
            "backward_passes": schedule_of(recipe.strategy.stages[-1]).period,
            "copies_measured_side_by_side": measured.copies,
        },
    )


def wish_of(recipe: Recipe) -> str:
    """How a session of this recipe would ask for its means to be taken, here. Raises GossamerError for no collective.

    On processors, that is: what lives on a GPU is answered by the engine, whatever is asked for.
    """
    wish = requested_collective(recipe.topology.collective)
    try:
        check_wish(wish)
    except ValueError as problem:
        raise GossamerError(f"GOSSAMER_COLLECTIVE says how means are taken, and {problem}") from None
    return wish


def _per_step(
    recipe: Recipe, measured: WorkloadProfile, network: Network, workers: int, tcp: Tcp, collective: str
) -> PerStep:
    """By the stage that lasts. Alone there is nobody to talk to."""
    stage, lines = recipe.strategy.stages[-1], NetworkCost(network, tcp, collective)
    schedule = schedule_of(stage)
    if workers > 1 and stage.merging is not None and stage.averages:
        site = site_size(stage, workers)
        inside, jobs = _Sites(network, site, tcp, collective), site_plan(measured, site)
        return run_sites(jobs, trips(recipe, measured, workers), schedule, measured, inside, lines, workers)
    if workers > 1 and (stage.apart or stage.delay):
        return run_turns(trips(recipe, measured, workers), schedule, measured, lines, workers)
    jobs = plan(recipe, measured, workers)
    windows = (1, DEPTH) if len(jobs) > 1 else (DEPTH,)  # a session tries both, and keeps the faster one
    found = [
        _exchanges(jobs, stage, measured, NetworkCost(network, tcp, collective), workers, each) for each in windows
    ]
    return min(found, key=lambda each: each.seconds)


def _exchanges(
    jobs: Sequence[BucketJob], stage: Stage, measured: WorkloadProfile, lines: NetworkCost, workers: int, window: int
) -> PerStep:
    """Backward passes before an exchange's last talk to nobody, and leave the optimizer nothing to do."""
    ends: Sequence[float] = [0.0] * workers
    for _ in range(STEPS_UNTIL_STEADY):
        begins = ends
        last_pass = [begin + (stage.accumulate - 1) * measured.backward_seconds for begin in begins]
        step = run_step(jobs, measured, lines, last_pass, window)
        ends = step.ends
    return PerStep(
        seconds=fmean(end - begin for end, begin in zip(step.ends, begins, strict=True)),
        waiting=fmean(step.waiting),
        wire=fmean(step.wire),
        codec=fmean(step.codec),
    )


class _Sites:
    """Lines on which every site talks for itself."""

    def __init__(self, network: Network, size: int, tcp: Tcp, collective: str) -> None:
        ranks = [slice(first, first + size) for first in range(0, len(network.hosts), size)]
        self._sites = [
            (part, NetworkCost(replace(network, hosts=network.hosts[part]), tcp, collective)) for part in ranks
        ]

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        return [moment for part, site in self._sites for moment in site.answer(ops[part], starts[part])]

    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]:
        return [moment for part, site in self._sites for moment in site.broadcast(nbytes, starts[part])]


# -- what the lane has to do -------------------------------------------------------------------------------------------


def plan(recipe: Recipe, measured: WorkloadProfile, workers: int) -> list[BucketJob]:
    """What the lane does in an exchange of gradients. Alone, nothing."""
    return _jobs(recipe, measured.buckets, workers, measured.control_bytes) if workers > 1 else []


def site_plan(measured: WorkloadProfile, size: int) -> list[BucketJob]:
    """What the lane does in a step within a site of so many workers, where gradients travel dense."""
    return _jobs(Recipe(), measured.site_buckets, size, measured.site_control_bytes)


def trips(recipe: Recipe, measured: WorkloadProfile, workers: int) -> list[Trip]:
    """What a turn of each fragment takes: first a meeting; what is averaged along goes before the last bucket."""
    if recipe.strategy.stages[-1].mixing is not None:
        return [_round(recipe, measured, workers)]
    found = []
    for fragment in range(schedule_of(recipe.strategy.stages[-1]).fragments):
        buckets = [bucket for bucket in measured.buckets if bucket.fragment == fragment]
        *before, last = _jobs(recipe, buckets, workers, measured.control_bytes)
        along = [
            _word_alone(AllReduceMean(_floats(nbytes)))
            for nbytes in measured.rider_bytes[fragment : fragment + 1]
            if nbytes
        ]
        trip = Trip(
            jobs=[_word_alone(AllGather((_floats(POLL_BYTES),))), *before, *along, last],
            offering_seconds=sum(bucket.offering_seconds for bucket in buckets),
            landing_seconds=sum(bucket.landing_seconds for bucket in buckets),
        )
        found.append(trip)
    return found


def _round(recipe: Recipe, measured: WorkloadProfile, workers: int) -> Trip:
    """All buckets leave in one word, to the neighbours of the first round; what was heard of each is added alone."""
    letters = [neighbor_payload(recipe, Layout.of(each.shapes), dtype_of(each.dtype)) for each in measured.buckets]
    payload = (
        *(part for each in letters for part in each),
        _floats(measured.control_bytes + sum(measured.rider_bytes)),
    )
    topology = recipe.topology
    ops = tuple(
        NeighborAllGather(payload, topology.weights(rank, workers, 0), topology.tells(rank, workers, 0))
        for rank in range(workers)
    )
    encoding, decoding = (sum(each.computing_seconds[place] for each in measured.buckets) for place in (0, -1))
    job = BucketJob(rounds=[(encoding, ops, 0.0)], last_seconds=decoding * mean_neighbors(topology, workers))
    return Trip(jobs=[job])


def _floats(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes // 4, device="meta")


def _word_alone(op: AllGather | AllReduceMean) -> BucketJob:
    return BucketJob(rounds=[(0.0, op, 0.0)])


def _jobs(recipe: Recipe, buckets: Sequence[BucketProfile], workers: int, control_bytes: int) -> list[BucketJob]:
    """The last bucket takes the control word along."""
    return [_job(recipe, bucket, workers, control_bytes if bucket is buckets[-1] else 0) for bucket in buckets]


def _job(recipe: Recipe, bucket: BucketProfile, workers: int, control_bytes: int) -> BucketJob:
    ops = trace_ops(recipe, Layout.of(bucket.shapes), dtype_of(bucket.dtype), workers, control_bytes)
    *before, last = bucket.computing_seconds
    return BucketJob(
        ready_seconds=bucket.ready_seconds,
        rounds=list(zip(before, ops, bucket.engine_seconds, strict=True)),
        last_seconds=last,
    )
