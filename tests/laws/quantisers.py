"""Compressors that send every entry in a few bits. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import ring, sizes
from laws.laws import SHAPES

from gossamer.algorithms.compressors import (
    BinMeans,
    Compressor,
    Feedback,
    Float4,
    OneBit,
    Route,
    SignMagnitude,
    TernGrad,
    TwoBit,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD

CODECS: list[Compressor] = [
    Int8(block=16, stochastic=True),
    QSGD(),
    QSGD(levels=3, block=16),
    TernGrad(),
    TernGrad(per_byte=4),
    TernGrad(clip=2.5),
    OneBit(),
    OneBit(block=16),
    OneBit(columns=True),
    TwoBit(),
    TwoBit(adaptive=True),
    Float4(),
    Float4(block=6),
    SignMagnitude(),
    SignMagnitude(block=16),
    BinMeans(),
    BinMeans(bits=4, deviations=4.0),
]
EXACT: list[Compressor] = [
    *CODECS,
    *(Feedback(codec) for codec in CODECS),
    Route(Feedback(QSGD())),
    Route(Feedback(TwoBit(adaptive=True))),
    Route(Feedback(TernGrad()), rest=Feedback(OneBit(columns=True)), smallest=100),
    Feedback(Route(QSGD())),
]
ROUNDED: list[Compressor] = []


def bits(count: int) -> int:
    """Bytes of `count` bits an entry, every tensor from a byte of its own."""
    return sum(math.ceil(count * size / 8) for size in sizes())


def numbers(block: int) -> int:
    """Bytes of one float32 per block."""
    return 4 * sum(math.ceil(size / block) for size in sizes())


def columns() -> int:
    return sum(math.prod(shape[1:]) if len(shape) > 1 else 1 for shape in SHAPES.values())


TENSORS, REST = len(SHAPES), 20 + 48 + 1 + 240  # the latter below 256 entries or of one dimension
FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (Int8(block=16, stochastic=True), lambda n: (n - 1) * (bits(8) + numbers(16))),
    (QSGD(), lambda n: (n - 1) * (bits(8) + numbers(512))),
    (QSGD(levels=128), lambda n: (n - 1) * (bits(9) + numbers(512))),
    (QSGD(levels=7, block=16), lambda n: (n - 1) * (bits(4) + numbers(16))),
    (QSGD(levels=1, block=64), lambda n: (n - 1) * (bits(2) + numbers(64))),
    (TernGrad(), lambda n: (n - 1) * sum(4 + math.ceil(size / 5) for size in sizes())),
    (TernGrad(per_byte=4), lambda n: (n - 1) * sum(4 + math.ceil(size / 4) for size in sizes())),
    (Feedback(TernGrad(clip=2.5)), lambda n: (n - 1) * sum(4 + math.ceil(size / 5) for size in sizes())),
    (OneBit(), lambda n: (n - 1) * (bits(1) + numbers(2048))),
    (Feedback(OneBit(block=16)), lambda n: (n - 1) * (bits(1) + numbers(16))),
    (OneBit(columns=True), lambda n: (n - 1) * (bits(1) + 8 * columns())),
    (TwoBit(), lambda n: (n - 1) * bits(2)),
    (Feedback(TwoBit(adaptive=True)), lambda n: (n - 1) * (bits(2) + 4 * TENSORS)),
    (Float4(), lambda n: (n - 1) * (bits(4) + numbers(256))),
    (Feedback(Float4(block=6)), lambda n: (n - 1) * (bits(4) + numbers(6))),
    (SignMagnitude(), lambda n: (n - 1) * (bits(2) + 2 * numbers(512))),
    (Feedback(SignMagnitude(block=16)), lambda n: (n - 1) * (bits(2) + 2 * numbers(16))),
    (BinMeans(), lambda n: (n - 1) * (bits(2) + 4 * 4 * TENSORS)),
    (Feedback(BinMeans(bits=4)), lambda n: (n - 1) * (bits(4) + 4 * 16 * TENSORS)),
    (Route(Feedback(QSGD())), lambda n: (n - 1) * (270 + 4 + 528 + 8) + ring(n, 4 * REST)),
    (Route(Feedback(TernGrad())), lambda n: (n - 1) * (4 + 54 + 4 + 106) + ring(n, 4 * REST)),
]
