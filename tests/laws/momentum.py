"""Compressors that own momentum. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import places, ring, sizes, sparse

from gossamer.algorithms.compressors import (
    DGC,
    AdamUpdate,
    CompressedAdam,
    Compressor,
    Dense,
    Feedback,
    MicroAdam,
    OneBit,
    OneBitAdam,
    Route,
    TopK,
)
from gossamer.algorithms.compressors.int8 import Int8

EXACT: list[Compressor] = [
    DGC(density=0.1),
    DGC(density=0.1, masking=False),
    DGC(density=0.1, warmup=3, clip=0.5),
    DGC(density=0.1, then=Int8(block=16)),
    DGC(density=1.0),
    Route(DGC(density=0.1), rest=Feedback(Int8())),
    OneBitAdam(warmup=2),
    OneBitAdam(warmup=2, inner=Dense(), clip=0.5),
    OneBitAdam(warmup=1, inner=Feedback(OneBit(block=16))),
    Route(OneBitAdam(warmup=2, inner=Feedback(Int8(block=16)))),
    CompressedAdam(inner=Feedback(TopK(density=0.1))),
    CompressedAdam(inner=Dense(), variance="rows", warmup=2, clip=0.5),
    MicroAdam(inner=Feedback(TopK(density=0.1)), window=3),
    MicroAdam(inner=Dense(), clip=0.5),
    AdamUpdate(inner=Dense()),  # what it conserves is no gradient: see tests/compressors/test_adam_update.py
    AdamUpdate(inner=TopK(density=0.1), clip=0.5),
    Route(AdamUpdate(inner=Int8(block=16))),
]
ROUNDED: list[Compressor] = []


def early(world: int) -> float:
    """A quarter of every tensor, or everything where that is no more."""
    k = sum(max(1, round(0.25 * size)) for size in sizes())
    return min((world - 1) * (4 * k + places(k, sum(sizes()))), ring(world, 4 * sum(sizes())))


def eight_bits(density: float) -> int:
    """What Int8(block=16) sends of a share of every tensor beyond four bytes for each value."""
    counts = [max(1, round(density * size)) for size in sizes()]
    return sum(k + 4 * math.ceil(k / 16) - 4 * k for k in counts)


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (DGC(density=0.1), lambda n: (n - 1) * sparse(sizes())),
    (DGC(density=0.1, then=Int8(block=16)), lambda n: (n - 1) * (sparse(sizes()) + eight_bits(0.1))),
    (DGC(density=0.1, warmup=3), early),
    (DGC(density=1.0), lambda n: ring(n, 4 * sum(sizes()))),
    (
        Route(DGC(density=0.1), rest=Feedback(Int8(block=16))),
        lambda n: (n - 1) * (sparse([270, 528]) + sum(s + 4 * math.ceil(s / 16) for s in (240, 20, 48, 1))),
    ),
    (OneBitAdam(warmup=2), lambda n: ring(n, 4 * sum(sizes()))),
    (CompressedAdam(inner=TopK(density=0.1)), lambda n: (n - 1) * sparse(sizes())),
    (MicroAdam(inner=TopK(density=0.1)), lambda n: (n - 1) * sparse(sizes())),
    (AdamUpdate(inner=TopK(density=0.1)), lambda n: (n - 1) * sparse(sizes())),
]
