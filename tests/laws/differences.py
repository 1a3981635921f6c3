"""Feedback whose messages are differences to those before. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import low_rank_elements, ring, sizes, sparse

from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    Hierarchical,
    OneBit,
    OneBitAdam,
    PowerSGD,
    RandomK,
    Route,
    Sharded,
    SparseSum,
    TernGrad,
    TopK,
    Warmup,
)
from gossamer.algorithms.compressors.int8 import Int8


def ef21(inner: Compressor, momentum: float | None = None) -> Feedback:
    return Feedback(inner, rule="ef21", momentum=momentum)


ALONE: list[Compressor] = [
    ef21(Dense()),
    ef21(Dense(), 0.3),
    ef21(TopK(density=0.1)),
    ef21(TopK(density=0.1), 0.3),
    ef21(Int8(block=16)),
    ef21(OneBit(block=16)),
    ef21(PowerSGD(rank=2), 0.5),
    ef21(RandomK(density=0.1, feedback=False)),
    ef21(TernGrad()),
    ef21(Sharded(Int8(block=16))),
    ef21(Sharded(TopK(density=0.1)), 0.5),
    ef21(SparseSum(TopK(density=0.1))),
    ef21(Route(TopK(density=0.1))),
    ef21(Warmup(TopK(density=0.1), steps=2)),
    ef21(Warmup(TopK(density=0.05))),
    ef21(Hierarchical(Int8(block=16), per_node=1)),
]
EXACT: list[Compressor] = [
    *ALONE,
    Route(ef21(TopK(density=0.1)), rest=ef21(Int8())),
    Warmup(ef21(PowerSGD(rank=2)), steps=2),
    Hierarchical(ef21(TopK(density=0.1), 0.5), per_node=1),
    OneBitAdam(warmup=1, inner=ef21(OneBit(block=16))),
]
ROUNDED: list[Compressor] = []

FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (ef21(TopK(density=0.1), 0.1), lambda n: (n - 1) * sparse(sizes())),
    (ef21(Int8(block=16)), lambda n: (n - 1) * sum(size + 4 * math.ceil(size / 16) for size in sizes())),
    (ef21(PowerSGD(rank=2)), lambda n: ring(n, 4 * low_rank_elements(2))),
]
