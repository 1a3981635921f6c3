"""Compressors between nodes, and how many workers make how large ones."""

from __future__ import annotations

from gossamer.algorithms.compressors import (
    ARCTopK,
    Compressor,
    Dense,
    Feedback,
    Hierarchical,
    OneBit,
    PowerSGD,
    RandomK,
    Route,
    Sharded,
    SharedMask,
    TopK,
    Warmup,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD

FED_BACK = Feedback(TopK(density=0.1))
BETWEEN: list[Compressor] = [
    Dense(),
    TopK(density=0.1),
    FED_BACK,
    Route(FED_BACK),
    Feedback(OneBit(block=16)),
    Feedback(PowerSGD(rank=2)),
    RandomK(density=0.1),
    Feedback(ARCTopK(density=0.1, row=8)),
    Feedback(SharedMask(density=0.1)),
    QSGD(),
    Sharded(Int8(block=16)),
    Warmup(FED_BACK, steps=2),
    Hierarchical(FED_BACK, per_node=1),
]
NODES = [(4, 2), (6, 3), (4, 4)]  # workers, in each node
