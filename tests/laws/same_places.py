"""Few entries at the same places on all ranks. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import places, ring, sizes

from gossamer.algorithms.compressors import ARCTopK, Compressor, Feedback, Hierarchical, Route, SharedMask, Warmup

EXACT: list[Compressor] = [
    ARCTopK(density=0.1, row=8),
    ARCTopK(density=0.1, row=8, rank=2),
    ARCTopK(density=1.0),
    Feedback(ARCTopK(density=0.1, row=8)),
    Feedback(ARCTopK(density=0.2, row=7)),
    Feedback(Route(ARCTopK(density=0.1, row=16, rank=4))),
    Route(Feedback(ARCTopK(density=0.1))),
    Hierarchical(Feedback(ARCTopK(density=0.1, row=8)), per_node=1),
    SharedMask(density=0.1),
    SharedMask(density=1.0),
    Feedback(SharedMask(density=0.1)),
    Feedback(SharedMask(density=0.5)),
    Feedback(Route(SharedMask(density=0.1))),
    Route(Feedback(SharedMask(density=0.01)), smallest=100),
    Warmup(Feedback(SharedMask(density=0.1)), steps=2),
    Hierarchical(Feedback(SharedMask(density=0.1)), per_node=1),
]
ROUNDED: list[Compressor] = []


def sketched(sizes: list[int], world: int, density: float, row: int, rank: int = 1) -> float:
    """Values of whole rows, and two bytes for each number of a sketch."""
    rows = [math.ceil(size / row) for size in sizes]
    values = 4 * row * sum(max(1, round(density * count)) for count in rows)
    return ring(world, min(values + 2 * rank * sum(rows), 4 * sum(sizes)))


def masked(numel: int, world: int, density: float) -> float:
    """Values at the mask, and each rank's places of the next one."""
    each = min(numel // world, math.ceil(max(1, round(density * numel)) / world))
    sent = ring(world, 4 * world * each) + (world - 1) * places(each, math.ceil(numel / world))
    return min(sent, ring(world, 4 * numel)) if numel >= world else ring(world, 4 * numel)


DENSE_TENSORS = 240 + 20 + 48 + 1
FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (ARCTopK(density=0.1, row=8), lambda n: sketched(sizes(), n, 0.1, 8)),
    (Feedback(ARCTopK(density=0.1, row=8, rank=2)), lambda n: sketched(sizes(), n, 0.1, 8, 2)),
    (Feedback(ARCTopK(density=1.0)), lambda n: ring(n, 4 * sum(sizes()))),
    (
        Route(Feedback(ARCTopK(density=0.1))),
        lambda n: sketched([270, 528], n, 0.1, 64) + ring(n, 4 * DENSE_TENSORS),
    ),
    (SharedMask(density=0.1), lambda n: masked(sum(sizes()), n, 0.1)),
    (Feedback(SharedMask(density=0.1)), lambda n: masked(sum(sizes()), n, 0.1)),
    (Feedback(SharedMask(density=0.001)), lambda n: masked(sum(sizes()), n, 0.001)),
    (Feedback(SharedMask(density=1.0)), lambda n: ring(n, 4 * sum(sizes()))),
    (Route(Feedback(SharedMask(density=0.1))), lambda n: masked(270 + 528, n, 0.1) + ring(n, 4 * DENSE_TENSORS)),
]
