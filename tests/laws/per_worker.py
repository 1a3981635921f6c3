"""Compressors with another codec on some workers. Subjects of the laws; test_per_worker has their bytes, by rank."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.algorithms.compressors import (
    Compressor,
    Feedback,
    Float4,
    OneBit,
    PerWorker,
    Rotated,
    Route,
    Sharded,
    TopK,
)
from gossamer.algorithms.compressors.int8 import Int8

EXACT: list[Compressor] = [
    PerWorker(Int8(block=16), slow=OneBit(block=16), ranks=1),
    PerWorker(TopK(density=0.1), slow=OneBit(), ranks="0,4-7"),
    PerWorker(PerWorker(Int8(), slow=Float4(), ranks=0), slow=OneBit(), ranks=1),
    Feedback(PerWorker(Int8(block=16), slow=OneBit(block=16), ranks=1)),
    Feedback(PerWorker(TopK(density=0.1), slow=TopK(density=0.02), ranks=0)),
    Sharded(PerWorker(Int8(block=16), slow=OneBit(block=16), ranks=1)),
    Feedback(Sharded(PerWorker(Float4(), slow=OneBit(block=16), ranks="1-2"))),
    Feedback(Sharded(PerWorker(TopK(density=0.1), slow=Int8(), ranks=0))),
    Feedback(Rotated(PerWorker(Int8(), ranks=1), by="hadamard")),
    Route(Feedback(Sharded(PerWorker(Int8(), ranks=1))), smallest=100),
]
ROUNDED: list[Compressor] = []
FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = []
