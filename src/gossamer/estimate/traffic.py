"""What a step will send and remember, before any worker starts: the real aggregations on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from gossamer.compressors.error_feedback import RESIDUAL
from gossamer.compressors.sharded import OWED
from gossamer.core.aggregation import AggregationContext, State
from gossamer.core.layout import FlatTensors, Layout, accumulation_dtype, dtype_of
from gossamer.core.ops import Payload, payload_bytes
from gossamer.estimate.workload_profile import STEADY
from gossamer.events import Attached
from gossamer.parameter_server.client.traffic import server_traffic as price_servers
from gossamer.parameter_server.from_recipe import push_pull_codecs
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.participation import POLL_BYTES
from gossamer.reducer.step_report import WEIGHT_BYTES
from gossamer.runtime.runner import OpCost, price
from gossamer.strategies import GossipStrategy, Stage
from gossamer.strategies.base import schedule_of
from gossamer.synchronizers.stages import site_size
from gossamer.topologies import Topology


@dataclass(frozen=True)
class TrafficItem:
    """What is no part of a bucket: the payload bytes that one worker sends for it in a cycle."""

    where: str
    op: str
    bytes_sent: float


@dataclass(frozen=True, kw_only=True)
class TrafficEstimate:
    """What one worker of `workers` sends and keeps, once the stage that lasts goes on; bytes are payload.

    A cycle is what repeats itself: so many backward passes, counted as so many steps. buckets: the words of each bucket
    in a cycle; others: everything else that is sent in it; dense: what a ring would send of all gradients in float32
    after one backward pass; strategy: what the strategy keeps, also of what is under way.
    """

    workers: int
    parameters: int
    tensors: int
    passes: int
    steps: int
    buckets: tuple[tuple[OpCost, ...], ...]
    others: tuple[TrafficItem, ...]
    dense_bytes_sent: float
    residual_bytes: int
    other_state_bytes: int
    strategy_bytes: int

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
    def share_of_dense(self) -> float | None:
        """Bytes sent over those of a dense ring after every backward pass; None in a world of one: it sends nothing."""
        return self.bytes_sent_per_pass / self.dense_bytes_sent if self.dense_bytes_sent else None


def estimate_traffic(recipe: Recipe, model: Attached, *, workers: int) -> TrafficEstimate:
    """Price one cycle of a resolved recipe over the buckets of a model that is attached with it."""
    if recipe.strategy.stages[-1].serving is not None:
        return _of_servers(recipe, model, workers)
    stage, at = (
        recipe.strategy.stages[-1],
        AggregationContext(step=STEADY, world=1 if recipe.strategy.stages[-1].mixing else workers),
    )
    kept, buckets = [], list[tuple[OpCost, ...]]()
    for dtype, layout in model.layouts:
        flat = torch.empty(layout.numel, dtype=dtype_of(dtype), device="meta")
        packed = FlatTensors(flat, layout)
        state = recipe.compressor.init(packed, at)
        kept.append((flat, state))
        if stage.mixing is not None:
            told = mean_neighbors(recipe.topology, workers) if stage.mixing.in_lock_step else float(2 * (workers > 1))
            buckets.append((OpCost("Mix", told * payload_bytes(neighbor_payload(recipe, layout, flat.dtype))),))
        else:
            buckets.append(tuple(price(recipe.compressor.aggregate(packed, state, at), workers)))
    parameters = sum(layout.numel for _, layout in model.layouts)
    memory = [(key, packed.flat.nbytes) for _, state in kept for key, packed in state.items()]
    residual_bytes = sum(nbytes for key, nbytes in memory if _is_residual(key))
    period = schedule_of(stage).period
    return TrafficEstimate(
        workers=workers,
        parameters=parameters,
        tensors=sum(len(layout) for _, layout in model.layouts),
        passes=period,
        steps=period if stage.apart else 1,
        buckets=tuple(buckets),
        others=tuple(_others(recipe, stage, model, workers, remembers=bool(memory))),
        dense_bytes_sent=_mean_bytes(4 * parameters, workers),
        residual_bytes=residual_bytes,
        other_state_bytes=sum(nbytes for _, nbytes in memory) - residual_bytes,
        strategy_bytes=sum(_kept_by_strategy(recipe, stage, flat) for flat, _ in kept)
        if stage.mixing is None or stage.mixing.in_lock_step
        else _kept_by_a_partner(recipe, model, workers),
    )


def _of_servers(recipe: Recipe, model: Attached, workers: int) -> TrafficEstimate:
    """With a server beside each worker, or beside some: what stays within a process is not sent."""
    ways = push_pull_codecs(recipe)
    slots = [(slot, dtype_of(dtype)) for dtype, layout in model.layouts for slot in layout]
    shapes, dtypes = {slot.name: slot.shape for slot, _ in slots}, {slot.name: dtype for slot, dtype in slots}
    servers = price_servers(
        ways, shapes, dtypes, min(ways.strategy.shards or workers, workers), AggregationContext(step=STEADY)
    )
    apart = (workers - 1) / workers
    sent = [
        each
        for number, server in enumerate(servers)
        for each in (
            TrafficItem(f"server {number}", "Push", apart * server.pushed_bytes),
            TrafficItem(f"server {number}", "Reply", apart * server.pulled_bytes),
        )
    ]
    memory = [(key, packed.flat.nbytes) for server in servers for key, packed in server.remembered.items()]
    residual_bytes = sum(nbytes for key, nbytes in memory if _is_residual(key))
    parameters = sum(slot.numel for slot, _ in slots)
    return TrafficEstimate(
        workers=workers,
        parameters=parameters,
        tensors=len(slots),
        passes=1,
        steps=1,
        buckets=(),
        others=tuple(sent) if workers > 1 else (),
        dense_bytes_sent=_mean_bytes(4 * parameters, workers),
        residual_bytes=residual_bytes,
        other_state_bytes=sum(nbytes for _, nbytes in memory) - residual_bytes,
        strategy_bytes=2 * sum(slot.numel * dtype.itemsize for slot, dtype in slots),
    )


def _others(recipe: Recipe, stage: Stage, model: Attached, workers: int, *, remembers: bool) -> Iterator[TrafficItem]:
    if stage.mixing is not None and not stage.mixing.in_lock_step:
        return iter(())  # a worker begins one exchange in a turn and answers one, on average, and that is all
    if stage.mixing is not None:
        return _of_a_round(stage.mixing, recipe, model, workers)
    return _of_turns(stage, model, workers) if stage.merging or stage.delay else _of_a_step(model, workers, remembers)


def _mean_bytes(nbytes: int, workers: int) -> float:
    return 2 * (workers - 1) * nbytes / workers


def _of_a_step(model: Attached, workers: int, remembers: bool) -> Iterator[TrafficItem]:
    """Where something is remembered, everyone's weight is known before anything leaves."""
    control_bytes = model.control_bytes + (WEIGHT_BYTES if remembers else 0)
    yield TrafficItem("control", "Gather", float((workers - 1) * control_bytes))
    yield TrafficItem("buffers", "broadcast", (workers - 1) * model.buffer_bytes / workers)


def _of_turns(stage: Stage, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """Every turn begins with a meeting and ends with a control word; sites make a step in every pass."""
    turns, passes = len(schedule_of(stage).cycle), schedule_of(stage).period
    yield TrafficItem("meetings", "Gather", float(turns * (workers - 1) * POLL_BYTES))
    yield TrafficItem("control", "Gather", float(turns * (workers - 1) * model.control_bytes))
    yield TrafficItem("averaged along", "Mean", _mean_bytes(sum(model.rider_bytes), workers))
    if stage.merging is not None and stage.averages and workers > 1:
        site = site_size(stage, workers)
        gradients = sum(layout.numel * dtype_of(dtype).itemsize for dtype, layout in model.layouts)
        yield TrafficItem("within sites", "Mean", passes * _mean_bytes(gradients, site))
        yield TrafficItem("within sites", "Gather", float(passes * (site - 1) * model.site_control_bytes))
        yield TrafficItem("within sites", "broadcast", passes * (site - 1) * model.buffer_bytes / site)


def _of_a_round(strategy: GossipStrategy, recipe: Recipe, model: Attached, workers: int) -> Iterator[TrafficItem]:
    """A head goes before the numbers; all workers hear of each other in some of the rounds."""
    along = 0
    if nbytes := sum(model.rider_bytes):
        numbers = torch.empty(nbytes // 4, device="meta")
        rule = strategy.rule(recipe.compressor).along
        offer = rule.offer(
            FlatTensors(numbers, Layout.of({"buffers": numbers})),
            rule.begin(numbers),
            State(),
            AggregationContext(),
            told=1,
        )
        along = payload_bytes(offer.payload)
    told = mean_neighbors(recipe.topology, workers)
    yield TrafficItem("control", "Mix", told * model.control_bytes)
    yield TrafficItem("meetings", "Gather", (workers - 1) * model.control_bytes / strategy.rounds_apart(workers))
    yield TrafficItem("mixed along", "Mix", told * along)


def neighbor_payload(recipe: Recipe, layout: Layout, dtype: torch.dtype) -> Payload:
    """What one neighbour is told of a bucket, over meta tensors."""
    mixing = recipe.strategy.stages[-1].mixing
    assert mixing is not None
    x, at, rule = (
        FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout),
        AggregationContext(),
        mixing.rule(recipe.compressor),
    )
    if not mixing.in_lock_step:
        x = FlatTensors(x.flat.to(accumulation_dtype(dtype)), layout)  # as partners show it
    state = recipe.compressor.init(x, at)
    return rule.offer(x, rule.begin(x.flat), state, AggregationContext(step=STEADY), told=1).payload


def mean_neighbors(topology: Topology, workers: int) -> float:
    """How many neighbours a worker tells in a round, on average over workers and rounds."""
    rounds = range(topology.rounds(workers))
    return fmean(len(topology.tells(rank, workers, number)) for number in rounds for rank in range(workers))


def _kept_by_strategy(recipe: Recipe, stage: Stage, flat: Tensor) -> int:
    """What it remembers, sums that are not complete, and copies of what is under way where it is not in the bucket."""
    if stage.mixing is not None:
        return sum(each.nbytes for each in stage.mixing.rule(recipe.compressor).begin(flat).values())
    schedule = schedule_of(stage)
    under_way = -(-schedule.delay // schedule.period)
    if stage.merging is None:
        return flat.nbytes * (under_way + (stage.accumulate > 1))
    copies = 2 * under_way if stage.merging.needs_own else 0
    return copies * flat.nbytes + sum(each.nbytes for each in stage.merging.begin(flat).values())


def _kept_by_a_partner(recipe: Recipe, model: Attached, workers: int) -> int:
    """What it shows and owes; its letter under way, and its last answer to each neighbour."""
    letters = 1 + max(len(recipe.topology.peers(rank, workers)) for rank in range(workers))
    dtypes = [(layout, dtype_of(text)) for text, layout in model.layouts]
    return sum(
        2 * layout.numel * accumulation_dtype(dtype).itemsize
        + letters * payload_bytes(neighbor_payload(recipe, layout, dtype))
        for layout, dtype in dtypes
    )


def _is_residual(key: str) -> bool:
    """Wrappers put prefixes before the keys of what they wrap: "0.residual"."""
    return key.rpartition(".")[2] in (RESIDUAL, OWED)


# -- shapes to price: made up, or a script's own
