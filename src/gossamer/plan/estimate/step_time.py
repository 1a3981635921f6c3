"""Step time estimate: seconds of a step on a network, from a profile measured here and the cost of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import hypot
from statistics import fmean
from typing import Any

import torch

from gossamer.algorithms.compressors import PerWorker
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.recipes.wrapping import replace_tables
from gossamer.algorithms.strategies import AveragingStage, GossipStage, GradientStage, Stage
from gossamer.base.layout import Layout, dtype_of
from gossamer.base.ops import AllGather, AllReduceMean, CollectiveOp, NeighborAllGather
from gossamer.base.units import seconds_text
from gossamer.comm.mesh.collective_selector import check_requested, requested_collective
from gossamer.comm.network import Network
from gossamer.comm.network.cost.cheapest_collective import is_alike
from gossamer.comm.network.cost.op_cost import NetworkCost, op_costs, representative_cost
from gossamer.comm.network.cost.representative_cost import RepresentativeCost
from gossamer.comm.network.cost.step_simulator import (
    STEPS_UNTIL_STEADY,
    AnswerTimes,
    BucketJob,
    PerStep,
    RankWork,
    Trip,
    run_sites,
    run_step,
    run_turns,
)
from gossamer.comm.network.tcp_model import ETHERNET, Tcp
from gossamer.comm.runtime.pipeline import DEPTH
from gossamer.errors import GossamerError
from gossamer.plan.estimate import calibration
from gossamer.plan.estimate.calibration import ForecastInterval, network_class, recipe_family
from gossamer.plan.estimate.workload_profile import ENOUGH_STEPS, BucketProfile, OtherLoad, WorkloadProfile
from gossamer.train.engine.participation import PACE_BYTES, POLL_BYTES
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import mean_neighbors, neighbor_payload

NOTICED_SLOWDOWN = 1.02
NOT_PREDICTABLE = (
    "the step time cannot be estimated for workers that do not wait for each other: gossamer simulate trains them in "
    "virtual time"
)


@dataclass(frozen=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of one step, long-term means over workers."""

    step_seconds: float
    waiting_seconds: float  # training thread waiting for the communication thread
    wire_seconds: float  # communication thread on the network, hidden behind computation or not
    codec_seconds: float  # communication thread compressing and decoding, hidden or not
    inputs: Mapping[str, Any]  # inputs of the estimate
    #: prediction interval of the measured step_seconds; None for unequal speeds, since past workers were equally fast
    interval: ForecastInterval | None = None
    speed_use: float = 1.0  # samples per second, as a part of those of the same workers without communication

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
    recipe: Recipe,
    measured: WorkloadProfile,
    network: Network,
    workers: int,
    tcp: Tcp = ETHERNET,
    shares: Sequence[int] | None = None,
) -> StepTimeEstimate:
    """Estimate a steady step of `recipe` with `workers` measured workers on `network`.

    A step is a reduction of gradients, or a backward pass of the fastest worker, averaged over a period, if parameters
    are averaged.

    Args:
        recipe: resolved.
        measured: profile of one worker, with the speeds of all.
        network: with a host for each worker.
        workers: their number.
        tcp: segmentation into packets; by default as on an Ethernet.
        shares: parts of a step, or local steps per period, of each worker; None: those for the workers' speeds.

    Raises:
        GossamerError: the recipe is not `is_predictable`.
    """
    if not is_predictable(recipe):
        raise GossamerError(f"{recipe!r} has no estimate: {NOT_PREDICTABLE}")
    stage = recipe.strategy.steady_stage
    recipe = replace(recipe, strategy=recipe.strategy.among(workers))
    works = rank_works(stage, measured, workers, shares)
    there = network.among(range(workers))
    recipe = placed_on(recipe, there, workers)
    collective = requested_by(recipe)
    found = _per_step(recipe, measured, there, works, tcp, collective)
    spread = input_spread(measured, found)
    family, where = recipe_family(recipe), network_class(there)
    return StepTimeEstimate(
        step_seconds=found.seconds,
        interval=None if measured.unequal else calibration.shipped().interval(found.seconds, family, where, spread),
        waiting_seconds=found.waiting,
        wire_seconds=found.wire,
        codec_seconds=found.codec,
        speed_use=_batches_per_step(stage, works) * measured.compute_seconds / found.seconds / _sum_of_speeds(works),
        inputs={
            "network": network.text,
            "workers": workers,
            "collective": collective,
            "compute_seconds": measured.compute_seconds,
            "codec_seconds": sum(sum(bucket.computing_seconds) for bucket in measured.buckets),
            "engine_seconds": sum(sum(bucket.engine_seconds) for bucket in measured.buckets),
            "buckets": len(measured.buckets),
            "backward_passes": recipe.strategy.steady_stage.schedule.period,
            "speeds": list(measured.speeds),
            "copies_measured_side_by_side": measured.copies,
            "timed_steps": measured.timed_steps,
            "other_load": asdict(measured.other_load),
        },
    )


def rank_works(
    stage: Stage, measured: WorkloadProfile, workers: int, shares: Sequence[int] | None = None
) -> list[RankWork]:
    """The work of each rank in a recipe's steady stage: its speed, and its part of a step or its local steps.

    The other arguments are those of estimate_step_time.
    """
    slowdowns = measured.slowdowns(workers)
    if not stage.communicates:  # one worker represents all, which make this many steps per second on average
        return [RankWork(slowdown=len(slowdowns) / sum(1 / each for each in slowdowns))]
    if shares is None:
        shares = stage.parts_at(slowdowns) or [1] * workers
        if not measured.unequal:
            shares = [max(shares)] * workers  # the worker with the most represents all
    if isinstance(stage, GradientStage) and stage.in_one_pass:
        whole = sum(shares) / (1 if measured.copies else workers)  # a profiled script computes all samples of a step
        return [RankWork(slowdown=each, parts=1, batch=n / whole) for each, n in zip(slowdowns, shares, strict=True)]
    if stage.per_site is not None or (stage.local_parameters and workers == 1):  # no round of all local steps
        shares = [1] * workers
    return [RankWork(slowdown=each, parts=n) for each, n in zip(slowdowns, shares, strict=True)]


def part_seconds(stage: Stage, measured: WorkloadProfile, workers: int) -> tuple[float, ...]:
    """Compute time of one part of a step of each worker, by rank: of a pass, a sample, or a local step."""
    works = rank_works(stage, measured, workers, stage.parts_at([1.0] * workers))
    if not stage.communicates:
        return tuple(measured.compute_seconds * each for each in measured.slowdowns(workers))
    samples = [1] * workers
    if isinstance(stage, GradientStage) and stage.in_one_pass:
        samples = list(stage.shares(workers, 0))
    return tuple(
        measured.compute_seconds * work.slowdown * work.batch / count
        for work, count in zip(works, samples, strict=True)
    )


def peer_step_seconds(recipe: Recipe, measured: WorkloadProfile, workers: int) -> tuple[float, ...]:
    """Seconds of a step of each worker, by rank, that waits for no other one: with its compression, without messages.

    measured: with the buckets of an exchange of two.
    """
    stage = recipe.strategy.steady_stage
    codec = sum(sum(bucket.computing_seconds) + sum(bucket.engine_seconds) for bucket in measured.buckets)
    computing = measured.compute_seconds + codec / stage.schedule.period
    return tuple(computing * slowdown for slowdown in measured.slowdowns(workers))


def _batches_per_step(stage: Stage, works: Sequence[RankWork]) -> float:
    """Batches of all workers per step of the schedule."""
    period = stage.schedule.period if stage.local_parameters and stage.per_site is None and len(works) > 1 else 1
    return sum((work.parts or 1) * work.batch for work in works) / period


def _sum_of_speeds(works: Sequence[RankWork]) -> float:
    return sum(1 / work.slowdown for work in works)


def placed_on(recipe: Recipe, network: Network, workers: int) -> Recipe:
    """The recipe with the slow workers of a network, for terms such as PerWorker(Int8(), below="20mbit")."""
    uplinks = [host.up_bits_per_second for host in network.hosts[:workers]]

    def placed(term: PerWorker) -> PerWorker:
        return term if term.needs_hosts else term.placed((), uplinks)

    return replace(recipe, compressor=replace_tables(recipe.compressor, placed))


def input_spread(measured: WorkloadProfile, found: PerStep) -> float:
    """Standard deviation of the estimate's logarithm, from the spread of the profile's steps and codec timings, each
    weighted by its part in the step. The two are assumed to be independent."""
    steps = measured.step_spread * (1 - found.waiting / found.seconds)
    whole = sum(
        sum(bucket.computing_seconds) for bucket in measured.buckets
    )  # of a whole round; a step has a part of it
    codecs = measured.codec_spread_seconds * found.codec / whole / found.seconds if whole else 0.0
    return hypot(steps, codecs)


def requested_by(recipe: Recipe) -> str:
    """The collective that a session of this recipe would request here. Raises GossamerError if it is invalid.

    "auto" means the mesh's; between GPUs NCCL may be faster, which is timed on the GPUs.
    """
    requested = requested_collective(recipe.topology.collective)
    try:
        check_requested(requested)
    except ValueError as problem:
        raise GossamerError(f"invalid GOSSAMER_COLLECTIVE, the all-reduce algorithm: {problem}") from None
    return requested


def _per_step(
    recipe: Recipe,
    measured: WorkloadProfile,
    network: Network,
    works: Sequence[RankWork],
    tcp: Tcp,
    collective: str,
) -> PerStep:
    """Cost of the steady stage. A single worker sends nothing."""
    stage, cost = recipe.strategy.steady_stage, partial(op_costs, network, tcp, collective)
    workers = len(works)
    if is_alike(network) and len(set(works)) == 1:
        works = works[:1]  # one simulated worker represents all
    if workers > 1 and stage.scheduled:
        moves = trips(recipe, measured, workers, len(works))
        if not isinstance(stage, AveragingStage) or stage.per_site is None:
            spread = workers // 2 if isinstance(stage, GossipStage) and measured.unequal else 0
            return run_turns(moves, stage.schedule, measured, cost(), works, spread)
        size = stage.site_size(workers)
        alone = is_alike(network)  # sites of equal hosts are represented by one
        sites = _one_site(network, size, tcp, collective) if alone else _Sites(network, size, tcp, collective)
        return run_sites(site_plan(measured, size), moves, stage.schedule, measured, sites, cost(), works)
    jobs = plan(recipe, measured, workers)
    depths = (1, DEPTH) if len(jobs) > 1 else (DEPTH,)  # a session tries both, and keeps the faster one
    found = [_reductions(jobs, measured, cost(), works, each) for each in depths]
    return min(found, key=lambda each: each.seconds)


def _reductions(
    jobs: Sequence[BucketJob], measured: WorkloadProfile, cost: AnswerTimes, works: Sequence[RankWork], depth: int
) -> PerStep:
    ends: Sequence[float] = [0.0] * len(works)
    for _ in range(STEPS_UNTIL_STEADY):
        begins = ends
        step = run_step(jobs, measured, cost, begins, depth, works)
        ends = step.ends
    return PerStep(
        seconds=fmean(end - begin for end, begin in zip(step.ends, begins, strict=True)),
        waiting=fmean(step.waiting),
        wire=fmean(step.wire),
        codec=fmean(step.codec),
    )


def _one_site(network: Network, size: int, tcp: Tcp, collective: str) -> RepresentativeCost:
    """Costs within one site, which represents all, of equal hosts."""
    return representative_cost(network.among(range(size)), tcp, collective)


class _Sites:
    """Costs of collectives within every site separately."""

    def __init__(self, network: Network, size: int, tcp: Tcp, collective: str) -> None:
        numbers = range(len(network.hosts))
        parts = [slice(first, first + size) for first in numbers[::size]]
        self._sites = [(part, NetworkCost(network.among(numbers[part]), tcp, collective)) for part in parts]

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
    poll_bytes = POLL_BYTES + PACE_BYTES * recipe.strategy.steady_stage.follows_speed
    return Trip(
        jobs=[_op_alone(AllGather((_floats(poll_bytes),))), *before, *averaged, last],
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
