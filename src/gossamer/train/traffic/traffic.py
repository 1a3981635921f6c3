"""Traffic estimate: bytes that a step sends and keeps, by the real aggregations on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import (
    AveragingStage,
    FederatedStage,
    GossipStage,
    GossipStrategy,
    GradientStage,
    ServerStage,
    SilentStage,
)
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import STEADY, AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype, dtype_of
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.runner import OpCost
from gossamer.events import Attached
from gossamer.train.engine.participation import PACE_BYTES, POLL_BYTES
from gossamer.train.engine.step_decision import STANDING_BYTES
from gossamer.train.parameter_server.client.partition import split
from gossamer.train.parameter_server.client.shard_client import blocks_of
from gossamer.train.parameter_server.from_recipe import PushPullCodecs, push_pull_codecs
from gossamer.train.parameter_server.shard_spec import Block
from gossamer.train.traffic.op_trace import on_meta, trace_bucket

MOST_RANKS = 256  # number of ranks with neighbors counted one by one


@dataclass(frozen=True)
class TrafficItem:
    """Payload bytes that one worker sends in a cycle outside of buckets."""

    where: str
    op: str
    bytes_sent: float


@dataclass(frozen=True, kw_only=True)
class TrafficEstimate:
    """Payload bytes that one of the workers sends and keeps in a steady cycle."""

    workers: int
    parameters: int
    tensors: int
    passes: int  # backward passes in a cycle
    steps: int  # in a cycle
    buckets: tuple[tuple[OpCost, ...], ...]  # the operations of each bucket in a cycle
    others: tuple[TrafficItem, ...]  # all other traffic of a cycle
    dense_bytes_sent: float  # of a ring all-reduce of all gradients in float32, after one backward pass
    residual_bytes: int
    other_state_bytes: int
    strategy_bytes: int  # kept by the strategy, also of rounds in flight

    @property
    def cycle_bytes_sent(self) -> float:
        ops = sum(op.bytes_sent for ops in self.buckets for op in ops)
        return ops + sum(other.bytes_sent for other in self.others)

    @property
    def bytes_sent(self) -> float:
        """Per step, on average."""
        return self.cycle_bytes_sent / self.steps

    @property
    def bytes_sent_per_pass(self) -> float:
        """Per backward pass, on average."""
        return self.cycle_bytes_sent / self.passes

    @property
    def memory_bytes(self) -> int:
        """Memory of a worker between steps, in addition to the model and its optimizer."""
        return self.residual_bytes + self.other_state_bytes + self.strategy_bytes

    @property
    def share_of_dense(self) -> float | None:
        """Bytes sent over those of a dense ring after every backward pass; None with one worker, as it sends none."""
        return self.bytes_sent_per_pass / self.dense_bytes_sent if self.dense_bytes_sent else None


def bits_per_second_to_hide(bytes_per_pass: float, compute_seconds: float) -> float:
    """The rate at which a backward pass's bytes are sent while a worker computes; on a slower network workers wait."""
    return 8 * bytes_per_pass / compute_seconds


def estimate_traffic(recipe: Recipe, model: Attached, *, workers: int) -> TrafficEstimate:
    """Price one cycle of a resolved recipe over the buckets of a model attached with it.

    Args:
        recipe: resolved for `workers`.
        model: layouts of its buckets.
        workers: number of workers.

    Returns:
        The estimate for one worker.
    """
    recipe = replace(recipe, strategy=recipe.strategy.among(workers))
    stage = recipe.strategy.steady_stage
    found = _cycle(recipe, model, workers)
    parameters = sum(layout.numel for _, layout in model.layouts)
    residual_bytes = sum(nbytes for key, nbytes in found.memory if is_unsent(key))
    return TrafficEstimate(
        workers=workers,
        parameters=parameters,
        tensors=sum(len(layout) for _, layout in model.layouts),
        passes=stage.schedule.period,
        steps=stage.schedule.period if stage.local_parameters else 1,
        buckets=tuple(found.buckets),
        others=tuple(found.others),
        dense_bytes_sent=_mean_bytes(4 * parameters, workers),
        residual_bytes=residual_bytes,
        other_state_bytes=sum(nbytes for _, nbytes in found.memory) - residual_bytes,
        strategy_bytes=found.strategy_bytes,
    )


class _Cycle(NamedTuple):
    """One cycle of a stage, for TrafficEstimate."""

    buckets: Sequence[tuple[OpCost, ...]]
    others: Sequence[TrafficItem]
    memory: Sequence[tuple[str, int]]  # (key, bytes) of compressor state
    strategy_bytes: int


def _cycle(recipe: Recipe, model: Attached, workers: int) -> _Cycle:
    match recipe.strategy.steady_stage:
        case GradientStage() as stage:
            return _of_gradients(stage, recipe.compressor, model, workers)
        case AveragingStage() as stage:
            return _of_averaging(stage, recipe.compressor, model, workers)
        case GossipStage(strategy=strategy) if strategy.in_lock_step:
            return _of_gossip(strategy, recipe, model, workers)
        case GossipStage(strategy=strategy):
            return _of_pairwise_gossip(strategy, recipe, model, workers)
        case ServerStage():
            return _of_servers(recipe, model, workers)
        case SilentStage():
            return _Cycle([], [], [], 0)
        case FederatedStage() as stage:
            stage.refuse()
        case stage:
            assert_never(stage)


# -- gradients, and parameters averaged by all workers -----------------------------------------------------------------


def _of_gradients(stage: GradientStage, compressor: Compressor, model: Attached, workers: int) -> _Cycle:
    """The strategy keeps incomplete sums and copies of gradients in flight."""
    buckets, memory = _aggregations(compressor, model, workers)
    others = _scheduled(stage, model, workers) if stage.delay else _of_a_step(model, workers, remembers=bool(memory))
    copies = _in_flight(stage) + (stage.accumulate > 1)
    return _Cycle(buckets, [*others], memory, sum(copies * flat.nbytes for flat in _flats(model)))


def _of_averaging(stage: AveragingStage, compressor: Compressor, model: Attached, workers: int) -> _Cycle:
    """The strategy keeps its memory and, if landing needs them, own contributions in flight."""
    buckets, memory = _aggregations(compressor, model, workers)
    others = [*_scheduled(stage, model, workers), *_within_sites(stage, model, workers)]
    copies = 2 * _in_flight(stage) if stage.strategy.needs_own else 0
    kept = sum(copies * flat.nbytes + _nbytes(stage.strategy.begin(flat).values()) for flat in _flats(model))
    return _Cycle(buckets, others, memory, kept)


def _aggregations(
    compressor: Compressor, model: Attached, workers: int
) -> tuple[list[tuple[OpCost, ...]], list[tuple[str, int]]]:
    """The operations of each bucket, and the compressor state of all."""
    traces = [trace_bucket(compressor, layout, dtype, workers) for dtype, layout in _layouts(model)]
    buckets = [
        tuple(OpCost(each.label, each.mean_bytes_sent(workers)) for op in trace.ops for each in op.concurrent())
        for trace in traces
    ]
    return buckets, [each for trace in traces for each in trace.remembered]


def _in_flight(stage: GradientStage | AveragingStage) -> int:
    """Number of rounds of a bucket in flight at the same time."""
    return -(-stage.schedule.delay // stage.schedule.period)


def _of_a_step(model: Attached, workers: int, *, remembers: bool) -> Iterator[TrafficItem]:
    """With compressor state, the weights of all workers are exchanged before the first bucket."""
    control_bytes = model.control_bytes + (STANDING_BYTES if remembers else 0)
    yield TrafficItem("control", "Gather", float((workers - 1) * control_bytes))
    yield TrafficItem("buffers", "broadcast", (workers - 1) * model.buffer_bytes / workers)


def _scheduled(stage: GradientStage | AveragingStage, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """Every scheduled round begins with a participation poll and ends with a report."""
    rounds = len(stage.schedule.period_rounds)
    poll_bytes = POLL_BYTES + PACE_BYTES * (stage.follows_speed and stage.local_parameters)
    yield TrafficItem("meetings", "Gather", float(rounds * (workers - 1) * poll_bytes))
    yield TrafficItem("control", "Gather", float(rounds * (workers - 1) * model.control_bytes))
    yield TrafficItem("averaged along", "Mean", _mean_bytes(sum(model.rider_bytes), workers))


def _within_sites(stage: AveragingStage, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """Sites make a separate step in every backward pass."""
    if stage.per_site is None or workers == 1:
        return
    site, passes = stage.site_size(workers), stage.schedule.period
    yield TrafficItem("within sites", "Mean", passes * _mean_bytes(_nbytes(_flats(model)), site))
    yield TrafficItem("within sites", "Gather", float(passes * (site - 1) * model.site_control_bytes))
    yield TrafficItem("within sites", "broadcast", passes * (site - 1) * model.buffer_bytes / site)


# -- gossip ------------------------------------------------------------------------------------------------------------


def _of_gossip(strategy: GossipStrategy, recipe: Recipe, model: Attached, workers: int) -> _Cycle:
    neighbors = mean_neighbors(recipe.topology, workers)
    kept = sum(_nbytes(strategy.rule(recipe.compressor).begin(flat).values()) for flat in _flats(model))
    others = _of_a_round(strategy, recipe.compressor, model, workers, neighbors)
    return _Cycle(_sent_to(neighbors, recipe, model), [*others], _remembered_alone(recipe.compressor, model), kept)


def _of_pairwise_gossip(strategy: GossipStrategy, recipe: Recipe, model: Attached, workers: int) -> _Cycle:
    """A worker starts one exchange per round and answers one, on average. It keeps two copies of its parameters, the
    published and the pending one, its message in flight, and its last answer to each neighbor."""
    buckets = _sent_to(float(2 * (workers > 1)), recipe, model)
    answers = 1 + max(len(recipe.topology.peers(rank, workers)) for rank in sampled_ranks(workers))
    kept = sum(
        2 * layout.numel * accumulation_dtype(dtype).itemsize
        + answers * payload_bytes(neighbor_payload(recipe, layout, dtype))
        for dtype, layout in _layouts(model)
    )
    return _Cycle(buckets, (), _remembered_alone(recipe.compressor, model), kept)


def _sent_to(neighbors: float, recipe: Recipe, model: Attached) -> list[tuple[OpCost, ...]]:
    payloads = [neighbor_payload(recipe, layout, dtype) for dtype, layout in _layouts(model)]
    return [(OpCost("Mix", neighbors * payload_bytes(payload)),) for payload in payloads]


def _remembered_alone(compressor: Compressor, model: Attached) -> list[tuple[str, int]]:
    """State of a compressor that every worker runs alone."""
    at = AggregationContext(step=STEADY)
    return [each for packed in _packed(model) for each in _remembered(compressor.init(packed, at))]


def _of_a_round(
    strategy: GossipStrategy, compressor: Compressor, model: Attached, workers: int, neighbors: float
) -> Iterator[TrafficItem]:
    """A header precedes the values; in some rounds all workers exchange headers."""
    state_bytes = 0
    if nbytes := sum(model.rider_bytes):
        numbers = torch.empty(int(nbytes) // 4, device="meta")
        rule, packed = strategy.rule(compressor).along, FlatTensors(numbers, Layout.of({"buffers": numbers}))
        offer = rule.offer(packed, rule.begin(numbers), State(), AggregationContext(), receivers=1)
        state_bytes = payload_bytes(offer.payload)
    yield TrafficItem("control", "Mix", neighbors * model.control_bytes)
    yield TrafficItem("meetings", "Gather", (workers - 1) * model.control_bytes / strategy.rounds_apart(workers))
    yield TrafficItem("mixed along", "Mix", neighbors * state_bytes)


def neighbor_payload(recipe: Recipe, layout: Layout, dtype: torch.dtype) -> Payload:
    """The payload of a bucket for one neighbor, over meta tensors."""
    strategy = recipe.strategy
    assert isinstance(strategy, GossipStrategy)
    shown = dtype if strategy.in_lock_step else accumulation_dtype(dtype)
    x, rule = on_meta(layout, shown), strategy.rule(recipe.compressor)
    state = recipe.compressor.init(x, AggregationContext())
    return rule.offer(x, rule.begin(x.flat), state, AggregationContext(step=STEADY), receivers=1).payload


def mean_neighbors(topology: Topology, workers: int) -> float:
    """Number of neighbors that a worker sends to in a round, on average over workers and rounds."""
    rounds = range(topology.rounds(workers))
    return fmean(len(topology.sends_to(rank, workers, number)) for number in rounds for rank in sampled_ranks(workers))


def sampled_ranks(workers: int) -> range:
    """All ranks, or an evenly spaced sample when there are many."""
    return range(0, workers, max(1, workers // MOST_RANKS))


# -- parameter servers -------------------------------------------------------------------------------------------------


def _of_servers(recipe: Recipe, model: Attached, workers: int) -> _Cycle:
    """With a server in each worker's process, or in some; traffic within a process is not sent."""
    codecs = push_pull_codecs(recipe)
    dtypes = {slot.name: dtype for dtype, layout in _layouts(model) for slot in layout}
    shapes = {slot.name: slot.shape for _, layout in model.layouts for slot in layout}
    count = min(codecs.strategy.shards or workers, workers)
    servers = server_traffic(codecs, shapes, dtypes, count, AggregationContext(step=STEADY), workers)
    elsewhere = (workers - 1) / workers
    sent = [
        TrafficItem(f"server {number}", op, elsewhere * nbytes)
        for number, server in enumerate(servers if workers > 1 else ())
        for op, nbytes in (("Push", server.pushed_bytes), ("Reply", server.pulled_bytes))
    ]
    memory = [each for server in servers for each in _remembered(server.remembered)]
    copies = 3 if recipe.strategy.steady_stage.local_parameters else 2  # of the parameters or gradients
    return _Cycle((), sent, memory, copies * _nbytes(_flats(model)))


# -- tensors and their bytes -------------------------------------------------------------------------------------------


def _layouts(model: Attached) -> Iterator[tuple[torch.dtype, Layout]]:
    return ((dtype_of(text), layout) for text, layout in model.layouts)


def _packed(model: Attached) -> Iterator[FlatTensors]:
    return (on_meta(layout, dtype) for dtype, layout in _layouts(model))


def _flats(model: Attached) -> Iterator[Tensor]:
    return (packed.flat for packed in _packed(model))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _mean_bytes(nbytes: float, workers: int) -> float:
    return 2 * (workers - 1) * nbytes / workers


def _remembered(state: State) -> list[tuple[str, int]]:
    return [(key, packed.flat.nbytes) for key, packed in state.items()]


# -- bytes that workers and servers exchange, from real encodings of meta tensors --------------------------------------


class ServerTraffic(NamedTuple):
    """Payload bytes to and from one server in a worker's step, and the compressor's state for it."""

    pushed_bytes: int
    pulled_bytes: int
    remembered: State


def server_traffic(
    codecs: PushPullCodecs,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    shards: int,
    at: AggregationContext,
    workers: int = 1,
) -> list[ServerTraffic]:
    """Estimate the traffic of each server, for parameters in one optimizer group.

    A worker pulls one delta per step, or the uncompressed parameters; if staleness is allowed, one delta for each of
    `workers` contributions, or the whole estimate if that is smaller. With local steps this is the traffic of a period,
    with one answer for each fragment; uncompressed answers of a period contain each fragment once.

    Args:
        at: a step after any warm-up.
    """
    deltas, pulls = codecs.strategy.deltas_per_pull(workers), codecs.strategy.schedule.fragments
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    parts = split(Layout.of(shapes), shards, itemsizes)
    groups = dict.fromkeys(shapes, 0)
    return [
        _of_server(
            codecs,
            [_meta_block(each, dtypes) for each in blocks_of(part, shapes, dtypes, groups, codecs.push)],
            at,
            deltas,
            pulls,
        )
        for part in parts
    ]


def _of_server(
    codecs: PushPullCodecs, blocks: Sequence[FlatTensors], at: AggregationContext, deltas: int, pulls: int
) -> ServerTraffic:
    pushed, pulled, whole, remembered = 0, 0, 0, State()
    for number, block in enumerate(blocks):
        state = point_to_point.begin(codecs.push, block, at)
        remembered.update({f"{number}.{key}": value for key, value in state.items()})
        pushed += payload_bytes(point_to_point.encode(codecs.push, block, state, at).payload)
        if codecs.pull is None:
            pulled += block.flat.nbytes
        else:
            missing = FlatTensors(block.flat.to(accumulation_dtype(block.flat.dtype)), block.layout)
            delta = point_to_point.encode(codecs.pull, missing, point_to_point.begin(codecs.pull, missing, at), at)
            pulled, whole = pulled + deltas * payload_bytes(delta.payload), whole + missing.flat.nbytes
    if codecs.pull is not None:
        pulled = pulls * min(pulled, whole)
    return ServerTraffic(pushed, pulled, remembered)


def _meta_block(block: Block, dtypes: Mapping[str, torch.dtype]) -> FlatTensors:
    dtype = dtypes[block.tensors[0][0]]
    return FlatTensors.zeros(block.layout, dtype=dtype, device=torch.device("meta"))
