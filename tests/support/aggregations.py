"""Aggregations of several workers in one thread, and what they are priced at without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import OpCost, price, simulate


def aggregate(
    compressor: Compressor,
    inputs: Sequence[Tensor],
    layout: Layout,
    states: Sequence[State] | None = None,
    outs: Sequence[Tensor | None] | None = None,
    at: Callable[[int], AggregationContext] | None = None,
) -> list[AggregationResult]:
    """One aggregation, by rank; nothing is committed. at: the context of each rank, the first step's by default."""
    world = len(inputs)
    at = at or (lambda rank: AggregationContext(rank=rank, world=world))
    scripts = [
        compressor.aggregate(FlatTensors(x, layout), state, at(rank), out)
        for rank, (x, state, out) in enumerate(
            zip(inputs, states or [State() for _ in inputs], outs or [None] * world, strict=True)
        )
    ]
    found: list[AggregationResult] = simulate(scripts)
    return found


def priced(compressor: Compressor, world: int, layout: Layout, step: int = 0) -> list[OpCost]:
    """The ops of one aggregation of float32, priced on meta tensors."""
    x = FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("meta"))
    at = AggregationContext(step=step, world=world)
    return price(compressor.aggregate(x, compressor.init(x, at), at), world)


def priced_bytes(compressor: Compressor, world: int, layout: Layout, step: int = 0) -> float:
    return sum(op.bytes_sent for op in priced(compressor, world, layout, step))
