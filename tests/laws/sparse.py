"""Compressors that send few entries, and what wraps them. Subjects of the laws, and their bytes."""

from __future__ import annotations

from collections.abc import Callable

from laws.formulas import places, ring, sizes, sparse

from gossamer.algorithms.compressors import (
    Adaptive,
    Chain,
    Compressor,
    Feedback,
    OneBit,
    PowerSGD,
    RandomK,
    Route,
    TopK,
    TwoBit,
    Warmup,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.compressors.threshold import Threshold

EXACT: list[Compressor] = [
    RandomK(density=0.1),
    RandomK(density=1.0),
    RandomK(density=0.3, feedback=False),
    Feedback(RandomK(density=0.1)),
    Feedback(RandomK(density=0.1, feedback=False)),
    Feedback(Route(RandomK(density=0.1))),
    Threshold(value=1.0),
    Threshold(value=2.5, capacity=0.3),
    Threshold(value=0.0, capacity=1.0),
    Feedback(Threshold(value=1.0)),
    Feedback(Threshold(value=2.5, capacity=0.3)),
    Feedback(Threshold(value=2.5, capacity=0.01)),
    Chain(TopK(density=0.1), Int8()),
    Chain(TopK(density=0.3), TopK(density=0.5)),
    Feedback(Chain(TopK(density=0.1), Int8(block=16))),
    Feedback(Chain(TopK(density=0.1), OneBit())),
    Feedback(Chain(TopK(density=0.1), TwoBit(threshold=0.5))),
    Feedback(Chain(TopK(density=0.1), QSGD())),
    Feedback(Chain(TopK(density=1.0), Threshold(value=1.0))),
    Warmup(TopK(density=0.1), steps=2),
    Feedback(Warmup(TopK(density=0.1), steps=2)),
    Feedback(Warmup(Chain(TopK(density=0.1), Int8()), steps=2)),
    Warmup(Feedback(PowerSGD(rank=2)), steps=2),
    Feedback(Warmup(TopK(density=0.05))),
    Feedback(Warmup(Chain(TopK(density=0.05), Int8()))),
    Feedback(Warmup(RandomK(density=0.01))),
    Adaptive(TopK(density=0.1), every=2),
    Feedback(Adaptive(TopK(density=0.1), every=1)),
    Feedback(Adaptive(TopK(density=0.1), every=2)),
    Feedback(Adaptive(Chain(TopK(density=0.1), Int8()), every=2)),
    Feedback(Route(Adaptive(TopK(density=0.3), every=2))),
    Feedback(Warmup(Adaptive(TopK(density=0.1), every=2), steps=2)),
    Route(Feedback(TopK(density=0.1)), names="k*"),
    Feedback(TopK(density=0.1), decay=0.95),
    Feedback(Chain(TopK(density=0.1), Int8()), decay=0.5),
    Feedback(Route(RandomK(density=0.1)), decay=0.0),
    TopK(density=0.1, chunk=64),
    Feedback(TopK(density=0.1, chunk=7)),
    Feedback(Chain(TopK(density=0.1, chunk=64), Int8())),
]
ROUNDED: list[Compressor] = []

MEAN_OF_ALL = 4 * sum(sizes())


def kept(density: float) -> int:
    return sum(max(1, round(density * size)) for size in sizes())


def kept_of_runs(density: float, chunk: int) -> int:
    """At least one entry of each run, also of a tensor's last and shorter one."""
    runs = [min(chunk, size - start) for size in sizes() for start in range(0, size, chunk)]
    return sum(max(1, round(density * run)) for run in runs)


def threshold(room: int) -> int:
    """The number of those used, values and places."""
    return 4 + 4 * room + places(room, sum(sizes()))


def chained(density: float) -> int:
    """Places, and the values in eight bits with a scale per tensor: no tensor has more than 256 of them."""
    return places(kept(density), sum(sizes())) + kept(density) + 4 * len(sizes())


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (
        TopK(density=0.1, chunk=64),
        lambda n: (n - 1) * (4 * kept_of_runs(0.1, 64) + places(kept_of_runs(0.1, 64), sum(sizes()))),
    ),
    (RandomK(density=0.1), lambda n: ring(n, 4 * kept(0.1))),
    (Feedback(RandomK(density=0.1)), lambda n: ring(n, 4 * kept(0.1))),
    (Threshold(value=1.0), lambda n: (n - 1) * threshold(55)),
    (Feedback(Threshold(value=9.0, capacity=0.3)), lambda n: min((n - 1) * threshold(332), ring(n, MEAN_OF_ALL))),
    (Threshold(value=9.0, capacity=0.3), lambda n: min((n - 1) * threshold(332), ring(n, MEAN_OF_ALL))),
    (Chain(TopK(density=0.1), Int8()), lambda n: (n - 1) * chained(0.1)),
    (Feedback(Chain(TopK(density=0.1), Int8())), lambda n: (n - 1) * chained(0.1)),
    (Warmup(TopK(density=0.1), steps=1), lambda n: ring(n, MEAN_OF_ALL)),
    (Warmup(TopK(density=0.1), steps=0), lambda n: (n - 1) * sparse(sizes())),
    (Adaptive(TopK(density=0.1)), lambda n: (n - 1) * (sparse(sizes()) + 8 * len(sizes()))),
    (Feedback(Adaptive(TopK(density=0.1))), lambda n: (n - 1) * (sparse(sizes()) + 8 * len(sizes()))),
    (Route(TopK(density=0.1), names="k*"), lambda n: (n - 1) * sparse([528]) + ring(n, 4 * (240 + 20 + 48 + 270 + 1))),
]
