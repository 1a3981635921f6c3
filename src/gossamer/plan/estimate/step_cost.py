"""Step cost: one row of a cost table, for a recipe, a number of workers and a network, before a run.

In addition to the means of a traffic estimate, a row has the traffic of the busiest machine. In a direct or ring
all-reduce all workers send equally; in a tree, or next to a rank outside a power of two, some send more; and a
parameter server answers every worker. A machine that relays forwards the bytes of others in addition to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from gossamer.algorithms.collectives import Collective
from gossamer.algorithms.collectives.base import Does
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import (
    AveragingStage,
    FederatedStage,
    GossipStage,
    GradientStage,
    ServerStage,
    SilentStage,
)
from gossamer.algorithms.strategies.forms_by_speed import speed_use
from gossamer.base.layout import Layout, dtype_of
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_bytes,
)
from gossamer.comm.network import Network
from gossamer.comm.network.cost.cheapest_collective import chosen_collective, chosen_on_uniform_links, is_alike
from gossamer.comm.network.cost.message_schedule import Send
from gossamer.comm.network.cost.op_cost import message_plan, parts_of
from gossamer.comm.network.cost.representative_cost import UniformNetwork
from gossamer.events import Attached
from gossamer.plan.estimate.step_time import estimate_step_time, is_predictable, placed_on, requested_by
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import TrafficEstimate, estimate_traffic, mean_neighbors, sampled_ranks


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """The busiest machine in a step, averaged over a cycle."""

    machine: str  # "every worker", "some workers", "a relay", or "a server"
    bytes_sent: float
    bytes_received: float
    messages: float  # sent
    received_bytes: int  # payloads of others that a worker holds at once before decoding


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes and seconds of a step, long-term averages."""

    recipe: str
    workers: int
    bytes_sent: float  # per worker and step, mean over workers
    load: MachineLoad
    seconds: float  # of a step
    waiting_share: float  # fraction of the step
    codec_seconds: float  # communication thread, compressing and decoding
    at_least: bool  # whether `seconds` is a lower bound, from computing and the link of the busiest machine
    residual_bytes: int  # state of a worker between steps


def step_cost(
    recipe: Recipe,
    model: Attached,
    network: Network,
    workers: int,
    step_seconds: float,
    profile: Callable[[], WorkloadProfile],
    speeds: Sequence[float] = (),
) -> StepCost:
    """Bytes and the busiest machine are exact; seconds are estimated for recipes in lock step, else a lower bound.

    Args:
        recipe: resolved.
        model: layouts of its buckets.
        network: with a host for each worker.
        workers: their number.
        step_seconds: compute time of a step of a worker of speed 1.
        profile: with the speeds; called only if seconds can be estimated.
        speeds: of the workers, by rank; empty: all are 1.

    Raises:
        NetworkError: too many unequal hosts to simulate.
    """
    recipe = placed_on(recipe, network, workers)
    traffic = estimate_traffic(recipe, model, workers=workers)
    load = machine_load(recipe, model, traffic, network)
    if is_predictable(recipe):
        found = estimate_step_time(recipe, profile(), network, workers)
        seconds, share, codec = found.step_seconds, found.waiting_share, found.codec_seconds
    else:
        computing = step_seconds * mean_slowdown(recipe, speeds)
        line = seconds_on_the_line(load, network)
        seconds, codec = max(computing, line), 0.0
        share = 1 - computing / seconds
    return StepCost(
        recipe=repr(recipe),
        workers=workers,
        bytes_sent=traffic.bytes_sent,
        load=load,
        seconds=seconds,
        waiting_share=share,
        codec_seconds=codec,
        at_least=not is_predictable(recipe),
        residual_bytes=traffic.memory_bytes,
    )


def mean_slowdown(recipe: Recipe, speeds: Sequence[float]) -> float:
    """Seconds per step, relative to a worker of speed 1: by the mean rate of workers, or by the slowest if it is waited
    for."""
    if not speeds:
        return 1.0
    return len(speeds) / (speed_use(recipe.strategy, [1 / speed for speed in speeds]) * sum(speeds))


# -- the busiest machine -----------------------------------------------------------------------------------------------


def machine_load(recipe: Recipe, model: Attached, traffic: TrafficEstimate, network: Network) -> MachineLoad:
    """Load of the busiest machine. network: with a host for each worker."""
    workers = traffic.workers
    match recipe.strategy.among(workers).steady_stage:
        case SilentStage():
            return MachineLoad(machine="every worker", bytes_sent=0, bytes_received=0, messages=0, received_bytes=0)
        case GradientStage() | AveragingStage():
            load = _of_collectives(recipe, model, traffic, network)
            return _with_relays(load, _messages(recipe, model, network, workers), traffic, network)
        case GossipStage():
            return _with_relays(
                _of_neighbors(recipe, traffic), _messages_to_neighbors(recipe, traffic), traffic, network
            )
        case ServerStage():
            return _of_servers(traffic)
        case FederatedStage() as stage:
            stage.refuse()


def _of_collectives(recipe: Recipe, model: Attached, traffic: TrafficEstimate, network: Network) -> MachineLoad:
    tables, more, messages, gathered = _Tables(requested_by(recipe), network), 0.0, 0.0, 0
    traced: dict[tuple[str, Layout], Sequence[CollectiveOp]] = {}
    for dtype, layout in model.layouts:
        if (dtype, layout) not in traced:
            traced[dtype, layout] = trace_ops(recipe, layout, dtype_of(dtype), traffic.workers)
        for op in (each for traced_op in traced[dtype, layout] for each in traced_op.concurrent()):
            sent, letters = tables.busiest(op, traffic.workers)
            more, messages = more + sent - op.mean_bytes_sent(traffic.workers), messages + letters
            gathered = max(gathered, gathered_bytes(op, traffic.workers))
    sent = traffic.bytes_sent + more / traffic.steps
    return MachineLoad(
        machine="some workers" if more > 0.01 * traffic.cycle_bytes_sent else "every worker",
        bytes_sent=sent,
        bytes_received=sent,
        messages=messages / traffic.steps,
        received_bytes=gathered,
    )


def _of_neighbors(recipe: Recipe, traffic: TrafficEstimate) -> MachineLoad:
    receiver_counts = [
        len(recipe.topology.sends_to(rank, traffic.workers, 0)) for rank in sampled_ranks(traffic.workers)
    ]
    mean, most = sum(receiver_counts) / len(receiver_counts), max(receiver_counts)
    in_lock_step = recipe.strategy.steady_stage.in_lock_step
    share = most / mean if mean and in_lock_step else 1.0
    sent = traffic.bytes_sent * share
    payload = sum(op.bytes_sent for ops in traffic.buckets for op in ops) / max(mean, 1)
    return MachineLoad(
        machine="some workers" if share > 1.01 else "every worker",
        bytes_sent=sent,
        bytes_received=sent,
        messages=(most if in_lock_step else 2) / traffic.steps,
        received_bytes=int(payload * (most if in_lock_step else 1)),
    )


Message = tuple[int, int, float]  # sender, receiver, bytes


def _with_relays(
    load: MachineLoad, messages: Iterable[Message], traffic: TrafficEstimate, network: Network
) -> MachineLoad:
    """The load with what relays forward. messages: of all workers in a cycle; not read on a network without relays."""
    if not network.relayed:
        return load
    sent, received, forwarded = ([0.0] * (len(network.hosts) + len(network.relays)) for _ in range(3))
    for sender, receiver, nbytes in messages:
        sent[sender] += nbytes
        received[receiver] += nbytes
        if (relay := network.relay(sender, receiver)) is not None:
            forwarded[relay] += nbytes
    mean = sum(sent) / traffic.workers
    sent, received = ([*map(add, own, forwarded)] for own in (sent, received))
    busiest = max(range(len(sent)), key=lambda machine: (sent[machine], received[machine]))
    return replace(
        load,
        machine="a relay" if forwarded[busiest] else load.machine,
        bytes_sent=traffic.bytes_sent + (sent[busiest] - mean) / traffic.steps,
        bytes_received=traffic.bytes_sent + (received[busiest] - mean) / traffic.steps,
    )


def _messages(recipe: Recipe, model: Attached, network: Network, workers: int) -> Iterator[Message]:
    """Messages of the collective operations of a cycle."""
    way = message_plan(requested_by(recipe), network.among(range(workers)))
    for dtype, layout in model.layouts:
        for op in trace_ops(recipe, layout, dtype_of(dtype), workers):
            for rank in range(workers):
                for move in (each for moves in parts_of(op, rank, workers, way) for each in moves):
                    if isinstance(move, Send):
                        yield rank, move.to, move.nbytes


def _messages_to_neighbors(recipe: Recipe, traffic: TrafficEstimate) -> Iterator[Message]:
    """Messages of a round of gossip, a mean over the rounds of the topology."""
    topology, workers = recipe.topology, traffic.workers
    rounds = topology.rounds(workers)
    nbytes = sum(op.bytes_sent for ops in traffic.buckets for op in ops) / max(mean_neighbors(topology, workers), 1e-9)
    for turn in range(rounds):
        for rank in range(workers):
            for peer in topology.sends_to(rank, workers, turn):
                yield rank, peer, nbytes / rounds


def _of_servers(traffic: TrafficEstimate) -> MachineLoad:
    """Each server is on the machine of a worker, which pushes as all others do; a mean over the steps of a period."""
    others, steps = traffic.workers - 1, traffic.steps
    replies = [item.bytes_sent for item in traffic.others if item.op == "Reply"] or [0.0]
    pushes = [item.bytes_sent for item in traffic.others if item.op == "Push"] or [0.0]
    return MachineLoad(
        machine="a server",
        bytes_sent=(max(replies) * traffic.workers + sum(pushes)) / steps,
        bytes_received=(max(pushes) * traffic.workers + sum(replies)) / steps,
        messages=(others + len(pushes)) / steps,
        received_bytes=int(max(pushes)),
    )


def gathered_bytes(op: CollectiveOp, workers: int) -> int:
    """Payload bytes that a worker receives in an operation and holds at once; means arrive summed."""
    match op:
        case AllReduceMean():
            return 0
        case InGroup(ranks, inner):
            return gathered_bytes(inner, len(ranks))
        case AllGather(forms=tuple(forms)) | AllToAll(forms=tuple(forms)):  # the rank with the smallest message
            return sum(sorted(map(payload_bytes, forms))[1:])
        case AllGather() | AllToAll() | NeighborAllGather() | Coalesced():
            return int(op.bytes_sent(workers))


@dataclass(frozen=True)
class _Tables:
    """The tables of hops of all-reduces."""

    requested: str
    network: Network

    def busiest(self, op: CollectiveOp, world: int) -> tuple[float, int]:
        """(bytes, messages) of the rank that sends most in an operation."""
        match op:
            case AllReduceMean(tensor):
                return self._of_mean(tensor.numel(), tensor.element_size(), world)
            case InGroup(ranks, inner):
                return self.busiest(inner, len(ranks))
            case NeighborAllGather():
                return op.bytes_sent(world), sum(peer != 0 for peer in op.receivers)
            case AllGather(forms=tuple(forms)) | AllToAll(forms=tuple(forms)):
                return float((world - 1) * max(map(payload_bytes, forms))), world - 1
            case AllGather() | AllToAll() | Coalesced():
                return op.bytes_sent(world), world - 1

    def _of_mean(self, numel: int, itemsize: int, world: int) -> tuple[float, int]:
        if world == 1:
            return 0.0, 0
        table = self._table(numel * itemsize, itemsize, world)
        rank, filled = table.busiest(world), min(numel, table.pieces(world))
        sends = (hop for hop in table.hops(rank, world) if hop.does is Does.SEND)
        messages = sum(max(0, min(hop.stop, filled) - hop.first) for hop in sends)
        return float(table.bytes_sent(rank, world, numel, itemsize)), messages

    def _table(self, nbytes: int, itemsize: int, world: int) -> Collective:
        requested = "direct" if self.requested == "engine" else self.requested
        there = self.network.among(range(world))
        if is_alike(there):
            return chosen_on_uniform_links(requested, nbytes, itemsize, UniformNetwork.of(there))
        return chosen_collective(requested, nbytes, itemsize, there)


def seconds_on_the_line(load: MachineLoad, network: Network) -> float:
    """Minimum time of the busiest machine's link in a step: it may be the slowest of all."""
    up = min(host.up_bits_per_second for host in network.hosts)
    down = min(host.down_bits_per_second for host in network.hosts)
    return 8 * max(load.bytes_sent / up, load.bytes_received / down)
