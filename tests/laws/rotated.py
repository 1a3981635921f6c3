"""Compressors of coefficients. Subjects of the laws, and their bytes."""

from __future__ import annotations

from collections.abc import Callable

from laws.formulas import ring, sizes, sparse
from laws.quantisers import bits, numbers

from gossamer.algorithms.compressors import (
    EDEN,
    QSGD,
    Compressor,
    DeMo,
    Dense,
    Feedback,
    OneBit,
    PowerSGD,
    RandomK,
    Rotated,
    Route,
    Sharded,
    SparseSum,
    TernGrad,
    TopK,
    Warmup,
)
from gossamer.algorithms.compressors.int8 import Int8

EXACT: list[Compressor] = [
    EDEN(),
    EDEN(bits=2, block=64),
    Feedback(EDEN(bits=4, block=8)),
    Rotated(Dense()),
    Rotated(Dense(), by="hadamard"),
    Rotated(TopK(density=0.1), block=8),
    Rotated(QSGD(block=16), by="hadamard"),
    Rotated(TernGrad(), by="hadamard", block=256),
    Rotated(PowerSGD(rank=2)),
    Feedback(Rotated(TopK(density=0.1))),
    Feedback(Rotated(Int8(block=16), by="hadamard")),
    Feedback(Rotated(OneBit(columns=True), by="hadamard", block=16)),
    Feedback(Rotated(PowerSGD(rank=2))),
    Feedback(Rotated(RandomK(density=0.1))),
    Feedback(Rotated(Sharded(Int8()), by="hadamard")),
    Feedback(Rotated(SparseSum(TopK(density=0.1)))),
    Feedback(Rotated(Warmup(TopK(density=0.1), steps=2))),
    DeMo(),
    DeMo(Route(TopK(density=0.1)), decay=0.5),
    DeMo(Dense(), decay=0.9, sign=False, clip=0.5),
    DeMo(Sharded(Int8(block=16)), decay=0.5),
    DeMo(SparseSum(TopK(density=0.1)), decay=0.9),
    Route(DeMo(Rotated(TopK(density=0.1), block=8), sign=False)),
    Route(Feedback(Rotated(TopK(density=0.1))), rest=Feedback(Rotated(Int8(), by="hadamard"))),
]
ROUNDED: list[Compressor] = [Rotated(Dense(dtype="float16"), by="hadamard")]


def powers_of_two(block: int) -> int:
    """Blocks of all tensors, of which what is left over is cut into powers of two."""
    return sum(size // block + (size % block).bit_count() for size in sizes())


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (Rotated(Dense()), lambda n: ring(n, 4 * sum(sizes()))),
    (DeMo(TopK(density=0.1)), lambda n: (n - 1) * sparse(sizes())),
    (Feedback(Rotated(TopK(density=0.1))), lambda n: (n - 1) * sparse(sizes())),
    (Rotated(QSGD(), by="hadamard"), lambda n: (n - 1) * (bits(8) + numbers(512))),
    (EDEN(), lambda n: (n - 1) * (8 + bits(1) + 4 * powers_of_two(4096))),
    (EDEN(bits=2, block=64), lambda n: (n - 1) * (8 + bits(2) + 4 * powers_of_two(64))),
]
