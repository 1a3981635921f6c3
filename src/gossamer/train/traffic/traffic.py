"""Traffic estimate: bytes that a step sends and keeps, by the real aggregations on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
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
from gossamer.train.engine.participation import POLL_BYTES
from gossamer.train.engine.report import STANDING_BYTES
from gossamer.train.parameter_server.client.traffic import server_traffic
from gossamer.train.parameter_server.from_recipe import push_pull_codecs
from gossamer.train.traffic.op_trace import on_meta, trace_bucket

MOST_RANKS = 256  # whose neighbors are counted one by one


@dataclass(frozen=True)
class TrafficItem:
    """Payload bytes that one worker sends in a cycle and that are no part of a bucket."""

    where: str
    op: str
    bytes_sent: float


@dataclass(frozen=True, kw_only=True)
class TrafficEstimate:
    """Payload bytes that one of the workers sends and keeps in a steady cycle, which repeats itself."""

    workers: int
    parameters: int
    tensors: int
    passes: int  # backward passes in a cycle
    steps: int  # in a cycle
    buckets: tuple[tuple[OpCost, ...], ...]  # the operations of each bucket in a cycle
    others: tuple[TrafficItem, ...]  # everything else that is sent in it
    dense_bytes_sent: float  # of a ring, for all gradients in float32, after one backward pass
    residual_bytes: int
    other_state_bytes: int
    strategy_bytes: int  # kept by the strategy, also of rounds in flight

    @property
    def cycle_bytes_sent(self) -> float:
        ops = sum(op.bytes_sent for ops in self.buckets for op in ops)
        return ops + sum(other.bytes_sent for other in self.others)

    @property
    def bytes_sent(self) -> float:
        """In a step, on average."""
        return self.cycle_bytes_sent / self.steps

    @property
    def bytes_sent_per_pass(self) -> float:
        """For a backward pass, on average."""
        return self.cycle_bytes_sent / self.passes

    @property
    def memory_bytes(self) -> int:
        """What a worker keeps between steps besides the model and its optimizer."""
        return self.residual_bytes + self.other_state_bytes + self.strategy_bytes

    @property
    def share_of_dense(self) -> float | None:
        """Bytes sent over those of a dense ring after every backward pass; None in a world of one: it sends nothing."""
        return self.bytes_sent_per_pass / self.dense_bytes_sent if self.dense_bytes_sent else None


def bits_per_second_to_hide(bytes_per_pass: float, compute_seconds: float) -> float:
    """The rate at which a backward pass's bytes leave while a worker computes; over a slower line workers wait."""
    return 8 * bytes_per_pass / compute_seconds


def estimate_traffic(recipe: Recipe, model: Attached, *, workers: int) -> TrafficEstimate:
    """Price one cycle of a resolved recipe over the buckets of a model that is attached with it."""
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
    """One cycle of a stage, as TrafficEstimate tells of it."""

    buckets: Sequence[tuple[OpCost, ...]]
    others: Sequence[TrafficItem]
    memory: Sequence[tuple[str, int]]  # (key, bytes) of what compressors remember
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
    """The strategy keeps sums that are not complete and copies of what is in flight."""
    buckets, memory = _aggregations(compressor, model, workers)
    others = _scheduled(stage, model, workers) if stage.delay else _of_a_step(model, workers, remembers=bool(memory))
    copies = _in_flight(stage) + (stage.accumulate > 1)
    return _Cycle(buckets, [*others], memory, sum(copies * flat.nbytes for flat in _flats(model)))


def _of_averaging(stage: AveragingStage, compressor: Compressor, model: Attached, workers: int) -> _Cycle:
    """The strategy keeps its memory, and own contributions in flight, where landing asks for these."""
    buckets, memory = _aggregations(compressor, model, workers)
    others = [*_scheduled(stage, model, workers), *_within_sites(stage, model, workers)]
    copies = 2 * _in_flight(stage) if stage.strategy.needs_own else 0
    kept = sum(copies * flat.nbytes + _nbytes(stage.strategy.begin(flat).values()) for flat in _flats(model))
    return _Cycle(buckets, others, memory, kept)


def _aggregations(
    compressor: Compressor, model: Attached, workers: int
) -> tuple[list[tuple[OpCost, ...]], list[tuple[str, int]]]:
    """The operations of each bucket, and what the compressor remembers of all."""
    traces = [trace_bucket(compressor, layout, dtype, workers) for dtype, layout in _layouts(model)]
    buckets = [
        tuple(OpCost(each.label, each.bytes_sent(workers, 0)) for op in trace.ops for each in op.concurrent())
        for trace in traces
    ]
    return buckets, [each for trace in traces for each in trace.remembered]


def _in_flight(stage: GradientStage | AveragingStage) -> int:
    """How many rounds of a bucket are in flight at once."""
    return -(-stage.schedule.delay // stage.schedule.period)


def _of_a_step(model: Attached, workers: int, *, remembers: bool) -> Iterator[TrafficItem]:
    """Where something is remembered, the weights of all workers are known before anything leaves."""
    control_bytes = model.control_bytes + (STANDING_BYTES if remembers else 0)
    yield TrafficItem("control", "Gather", float((workers - 1) * control_bytes))
    yield TrafficItem("buffers", "broadcast", (workers - 1) * model.buffer_bytes / workers)


def _scheduled(stage: GradientStage | AveragingStage, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """Every scheduled round begins with a participation poll and ends with a report."""
    rounds = len(stage.schedule.period_rounds)
    yield TrafficItem("meetings", "Gather", float(rounds * (workers - 1) * POLL_BYTES))
    yield TrafficItem("control", "Gather", float(rounds * (workers - 1) * model.control_bytes))
    yield TrafficItem("averaged along", "Mean", _mean_bytes(sum(model.rider_bytes), workers))


def _within_sites(stage: AveragingStage, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """Sites make a step of their own in every backward pass."""
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
    """A worker begins one exchange in a round and answers one, on average. It keeps two copies of its parameters, shown
    and owed, its message in flight, and its last answer to each neighbor."""
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
    """By a compressor that every worker runs by itself."""
    at = AggregationContext(step=STEADY)
    return [each for packed in _packed(model) for each in _remembered(compressor.init(packed, at))]


def _of_a_round(
    strategy: GossipStrategy, compressor: Compressor, model: Attached, workers: int, neighbors: float
) -> Iterator[TrafficItem]:
    """A header goes before the numbers; all workers hear of each other in some of the rounds."""
    state_bytes = 0
    if nbytes := sum(model.rider_bytes):
        numbers = torch.empty(int(nbytes) // 4, device="meta")
        rule, packed = strategy.rule(compressor).along, FlatTensors(numbers, Layout.of({"buffers": numbers}))
        offer = rule.offer(packed, rule.begin(numbers), State(), AggregationContext(), told=1)
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
    return rule.offer(x, rule.begin(x.flat), state, AggregationContext(step=STEADY), told=1).payload


def mean_neighbors(topology: Topology, workers: int) -> float:
    """How many neighbors a worker sends to in a round, on average over workers and rounds."""
    rounds = range(topology.rounds(workers))
    return fmean(len(topology.tells(rank, workers, number)) for number in rounds for rank in sampled_ranks(workers))


def sampled_ranks(workers: int) -> range:
    """All ranks, or of very many some that are evenly spread: graphs look much alike from each."""
    return range(0, workers, max(1, workers // MOST_RANKS))


# -- parameter servers -------------------------------------------------------------------------------------------------


def _of_servers(recipe: Recipe, model: Attached, workers: int) -> _Cycle:
    """With a server in each worker's process, or in some: traffic within a process is not sent."""
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
    return _Cycle((), sent, memory, 2 * _nbytes(_flats(model)))


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
