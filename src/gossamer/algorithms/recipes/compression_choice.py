"""Compression choice: plain, Sharded or SparseSum around a compressor, by the bytes that a worker sends."""

from __future__ import annotations

from functools import lru_cache

import torch

from gossamer.algorithms.compressors import Codec, Compressor, Sharded, SparseSum
from gossamer.algorithms.compressors.topk import Sparse
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import price

SAMPLE = Layout.of({"weight": (1024, 1024)})
SUMS_SAVE = 2.0  # times the bytes


def cheapest(compressor: Compressor, world: int | None) -> Compressor:
    """The compressor, or around it Sharded or SparseSum where so many workers then send less; world None: unknown.

    A sparse sum holds k entries, where those of all workers together are up to n k: for as many bytes both learn about
    as much, and for as many entries the sum learns less. So it has to send less than half.
    """
    if world is None:
        return compressor
    ways = [(1.0, compressor)]
    if isinstance(compressor, Sparse) and compressor.wants_feedback:
        ways.append((SUMS_SAVE, SparseSum(compressor)))
    if isinstance(compressor, Codec) and compressor.reencodable:
        ways.append((1.0, Sharded(compressor)))
    return min(ways, key=lambda way: way[0] * bytes_sent(way[1], world))[1]


@lru_cache(maxsize=256)
def bytes_sent(compressor: Compressor, world: int) -> float:
    """Bytes that each of so many workers sends for a matrix of a million entries."""
    x, at = FlatTensors.zeros(SAMPLE, dtype=torch.float32, device=torch.device("meta")), AggregationContext(world=world)
    return sum(op.bytes_sent for op in price(compressor.aggregate(x, compressor.init(x, at), at), world))
