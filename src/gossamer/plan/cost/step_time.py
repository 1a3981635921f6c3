"""Step time estimate: seconds of a step on a network, from a profile measured here and the cost of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import hypot
from statistics import fmean
from typing import Any

import torch

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import AveragingStage, GossipStage
from gossamer.base.layout import Layout, dtype_of
from gossamer.base.ops import AllGather, AllReduceMean, CollectiveOp, NeighborAllGather
from gossamer.base.units import seconds_text
from gossamer.comm.mesh.collective_selector import check_wish, requested_collective
from gossamer.comm.network import Network
from gossamer.comm.network.cost.cheapest_collective import is_alike
from gossamer.comm.network.cost.op_cost import NetworkCost, op_costs, representative_cost
from gossamer.comm.network.cost.representative_cost import RepresentativeCost
from gossamer.comm.network.cost.step_simulator import (
    STEPS_UNTIL_STEADY,
    AnswerTimes,
    BucketJob,
    PerStep,
    Trip,
    run_sites,
    run_step,
    run_turns,
)
from gossamer.comm.network.tcp_model import ETHERNET, Tcp
from gossamer.comm.runtime.pipeline import DEPTH
from gossamer.errors import GossamerError
from gossamer.plan.cost import calibration
from gossamer.plan.cost.calibration import ForecastInterval, network_class, recipe_family
from gossamer.plan.cost.workload_profile import ENOUGH_STEPS, BucketProfile, OtherLoad, WorkloadProfile
from gossamer.train.engine.participation import POLL_BYTES
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import mean_neighbors, neighbor_payload

NOTICED_SLOWDOWN = 1.02
NOT_PREDICTABLE = (
    "the step time cannot be estimated for workers that do not wait for each other: try it by gossamer run"
)


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of one step, long-term means over workers."""

    step_seconds: float
    waiting_seconds: float  # training thread waiting for the communication thread
    wire_seconds: float  # communication thread on the network, hidden behind computation or not
    codec_seconds: float  # communication thread compressing and decoding, hidden or not
    inputs: Mapping[str, Any]  # inputs of the estimate
    interval: ForecastInterval | None = None  # prediction interval of the measured step_seconds; None if not requested

    def __str__(self) -> str:
        """For example: 372 ms, 80 %: 350 to 410 ms."""
        return ", ".join([seconds_text(self.step_seconds), *([str(self.interval)] if self.interval else [])])

    @property
    def computing_seconds(self) -> float:
        """Compute time of the training thread, slowed down by compression."""
        return self.step_seconds - self.waiting_seconds

    @property
    def waiting_share(self) -> float:
        return self.waiting_seconds / self.step_seconds

    @property
    def caution(self) -> str | None:
        """Warning about an estimate from few steps or a busy machine; None without one."""
        notes = [note for note in (self._few_steps, self._busy_machine) if note]
        return "; ".join(notes) or None

    @property
    def _few_steps(self) -> str | None:
        timed, copies = self.inputs["timed_steps"], self.inputs["copies_measured_side_by_side"]
        if not timed or len(timed) >= ENOUGH_STEPS * copies:
            return None
        return (
            f"only {len(timed)} step{'s' * (len(timed) != 1)} were timed, of {min(timed):.2g} to {max(timed):.2g} "
            "seconds: let the script make more steps for a better estimate"
        )

    @property
    def _busy_machine(self) -> str | None:
        load = OtherLoad(**self.inputs.get("other_load", {}))
        if not load.is_much:
            return None
        others = f"other work kept {load.other + load.stolen:.1f} of {load.cores:.0f} cores busy while steps were timed"
        if load.slowdown < NOTICED_SLOWDOWN:
            return others
        return f"{others} and made them {load.slowdown:.2f}x as long; the estimate is corrected for this"


def is_predictable(recipe: Recipe) -> bool:
    """Whether workers of this recipe step together. Otherwise only a trial shows the speed of each."""
    return recipe.strategy.steady_stage.in_lock_step


def estimate_step_time(
    recipe: Recipe, measured: WorkloadProfile, network: Network, workers: int, tcp: Tcp = ETHERNET
) -> StepTimeEstimate:
    """Estimate a steady step of `recipe` with `workers` measured workers on `network`.

    A step is a reduction of gradients, or a backward pass, averaged over a period, if parameters are averaged.

    Args:
        recipe: resolved.
        measured: profile of one worker.
        network: with a host for each worker.
        workers: their number.
        tcp: segmentation into packets; by default as on an Ethernet.

    Raises:
        GossamerError: the recipe is not `is_predictable`.
    """
    if not is_predictable(recipe):
        raise GossamerError(f"{recipe!r} has no estimate: {NOT_PREDICTABLE}")
    recipe = replace(recipe, strategy=recipe.strategy.among(workers))
    there = replace(network, hosts=network.hosts[:workers])
    collective = wish_of(recipe)
    found = _per_step(recipe, measured, there, workers, tcp, collective)
    spread = input_spread(measured, found)
    family, where = recipe_family(recipe), network_class(there)
    return StepTimeEstimate(
        step_seconds=found.seconds,
        interval=calibration.shipped().interval(found.seconds, family, where, spread),
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
            "backward_passes": recipe.strategy.steady_stage.schedule.period,
            "copies_measured_side_by_side": measured.copies,
            "timed_steps": measured.timed_steps,
            "other_load": asdict(measured.other_load),
        },
    )


def input_spread(measured: WorkloadProfile, found: PerStep) -> float:
    """Standard deviation of the estimate's logarithm, from the spread of the profile's steps and codec timings, each
    weighted by its part in the step. The two are assumed to be independent."""
    steps = measured.step_spread * (1 - found.waiting / found.seconds)
    whole = sum(
        sum(bucket.computing_seconds) for bucket in measured.buckets
    )  # of a whole round; a step has a part of it
    codecs = measured.codec_spread_seconds * found.codec / whole / found.seconds if whole else 0.0
    return hypot(steps, codecs)


def wish_of(recipe: Recipe) -> str:
    """The collective that a session of this recipe would request here. Raises GossamerError if it is invalid.

    "auto" means the mesh's; between GPUs NCCL may be faster, which is timed on the GPUs.
    """
    wish = requested_collective(recipe.topology.collective)
    try:
        check_wish(wish)
    except ValueError as problem:
        raise GossamerError(f"invalid GOSSAMER_COLLECTIVE, the all-reduce algorithm: {problem}") from None
    return wish


def _per_step(
    recipe: Recipe, measured: WorkloadProfile, network: Network, workers: int, tcp: Tcp, collective: str
) -> PerStep:
    """Cost of the steady stage. A single worker sends nothing."""
    stage, cost = recipe.strategy.steady_stage, partial(op_costs, network, tcp, collective)
    workers = workers if stage.communicates else 1
    played = 1 if is_alike(network) else workers  # number of simulated workers, which represent all
    if workers > 1 and stage.scheduled:
        moves = trips(recipe, measured, workers, played)
        if not isinstance(stage, AveragingStage) or stage.per_site is None:
            return run_turns(moves, stage.schedule, measured, cost(), played)
        size = stage.site_size(workers)
        sites = _one_site(network, size, tcp, collective) if played == 1 else _Sites(network, size, tcp, collective)
        return run_sites(site_plan(measured, size), moves, stage.schedule, measured, sites, cost(), played)
    jobs = plan(recipe, measured, workers)
    depths = (1, DEPTH) if len(jobs) > 1 else (DEPTH,)  # a session tries both, and keeps the faster one
    found = [_reductions(jobs, stage.passes_per_step, measured, cost(), played, each) for each in depths]
    return min(found, key=lambda each: each.seconds)


def _reductions(
    jobs: Sequence[BucketJob], passes: int, measured: WorkloadProfile, cost: AnswerTimes, workers: int, depth: int
) -> PerStep:
    """Backward passes before a step's last one send nothing, and have no optimizer step."""
    ends: Sequence[float] = [0.0] * workers
    for _ in range(STEPS_UNTIL_STEADY):
        begins = ends
        last_pass = [begin + (passes - 1) * measured.backward_seconds for begin in begins]
        step = run_step(jobs, measured, cost, last_pass, depth)
        ends = step.ends
    return PerStep(
        seconds=fmean(end - begin for end, begin in zip(step.ends, begins, strict=True)),
        waiting=fmean(step.waiting),
        wire=fmean(step.wire),
        codec=fmean(step.codec),
    )


def _one_site(network: Network, size: int, tcp: Tcp, collective: str) -> RepresentativeCost:
    """Costs within one site, which represents all, of equal hosts."""
    return representative_cost(replace(network, hosts=network.hosts[:size]), tcp, collective)


class _Sites:
    """Costs of collectives within every site separately."""

    def __init__(self, network: Network, size: int, tcp: Tcp, collective: str) -> None:
        ranks = [slice(first, first + size) for first in range(0, len(network.hosts), size)]
        self._sites = [
            (part, NetworkCost(replace(network, hosts=network.hosts[part]), tcp, collective)) for part in ranks
        ]

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]:
        return [moment for part, site in self._sites for moment in site.answer(ops[part], starts[part])]

    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]:
        return [moment for part, site in self._sites for moment in site.broadcast(nbytes, starts[part])]


# -- work of the communication thread ----------------------------------------------------------------------------------


def plan(recipe: Recipe, measured: WorkloadProfile, workers: int) -> list[BucketJob]:
    """The communication thread's work in a reduction of gradients; empty for a single worker."""
    return _jobs(recipe, measured.buckets, workers, measured.control_bytes) if workers > 1 else []


def site_plan(measured: WorkloadProfile, size: int) -> list[BucketJob]:
    """The communication thread's work in a step within a site of `size` workers, where gradients are sent dense."""
    return _jobs(Recipe(), measured.site_buckets, size, measured.site_control_bytes)


def trips(recipe: Recipe, measured: WorkloadProfile, workers: int, played: int | None = None) -> list[Trip]:
    """One scheduled round of each fragment. played: number of simulated workers; None for all."""
    stage = recipe.strategy.steady_stage
    if isinstance(stage, GossipStage):
        return [_gossip_round(recipe, measured, workers, played or workers)]
    return [_round(recipe, measured, workers, fragment) for fragment in range(stage.schedule.fragments)]


def _round(recipe: Recipe, measured: WorkloadProfile, workers: int, fragment: int) -> Trip:
    """First a participation poll; averaged state is sent before the last bucket."""
    buckets = [bucket for bucket in measured.buckets if bucket.fragment == fragment]
    *before, last = _jobs(recipe, buckets, workers, measured.control_bytes)
    state = [nbytes for nbytes in measured.rider_bytes[fragment : fragment + 1] if nbytes]
    averaged = [_op_alone(AllReduceMean(_floats(nbytes))) for nbytes in state]
    return Trip(
        jobs=[_op_alone(AllGather((_floats(POLL_BYTES),))), *before, *averaged, last],
        offering_seconds=sum(bucket.offering_seconds for bucket in buckets),
        landing_seconds=sum(bucket.landing_seconds for bucket in buckets),
    )


def _gossip_round(recipe: Recipe, measured: WorkloadProfile, workers: int, played: int) -> Trip:
    """All buckets are sent in one operation, to the neighbors of the first round; each neighbor's are added alone."""
    messages = [neighbor_payload(recipe, Layout.of(each.shapes), dtype_of(each.dtype)) for each in measured.buckets]
    payload = (
        *(part for each in messages for part in each),
        _floats(measured.control_bytes + sum(measured.rider_bytes)),
    )
    topology = recipe.topology
    ops = tuple(
        NeighborAllGather(
            payload,
            tuple((peer, 0.0) for peer in topology.receives_from(rank, workers, 0)),  # weights do not affect the cost
            topology.sends_to(rank, workers, 0),
        )
        for rank in range(played)
    )
    encoding, decoding = (sum(each.computing_seconds[place] for each in measured.buckets) for place in (0, -1))
    job = BucketJob(rounds=[(encoding, ops, 0.0)], last_seconds=decoding * mean_neighbors(topology, workers))
    return Trip(jobs=[job])


def _floats(nbytes: float) -> torch.Tensor:
    return torch.empty(int(nbytes) // 4, device="meta")


def _op_alone(op: AllGather | AllReduceMean) -> BucketJob:
    return BucketJob(rounds=[(0.0, op, 0.0)])


def _jobs(recipe: Recipe, buckets: Sequence[BucketProfile], workers: int, control_bytes: int) -> list[BucketJob]:
    """The last bucket includes the control report."""
    return [_job(recipe, bucket, workers, control_bytes if bucket is buckets[-1] else 0) for bucket in buckets]


def _job(recipe: Recipe, bucket: BucketProfile, workers: int, control_bytes: int) -> BucketJob:
    ops = trace_ops(recipe, Layout.of(bucket.shapes), dtype_of(bucket.dtype), workers, control_bytes)
    *before, last = bucket.computing_seconds
    return BucketJob(
        ready_seconds=bucket.ready_seconds,
        rounds=list(zip(before, ops, bucket.engine_seconds, strict=True)),
        last_seconds=last,
    )
