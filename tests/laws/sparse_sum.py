"""Few entries added up where they belong. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import places, ring, sizes

from gossamer.algorithms.compressors import Compressor, Feedback, Route, SparseSum, TopK

EXACT: list[Compressor] = [
    SparseSum(TopK(density=0.1)),
    Feedback(SparseSum(TopK(density=0.1))),
    Feedback(SparseSum(TopK(density=0.6))),
    Feedback(SparseSum(TopK(density=1.0))),
    Route(Feedback(SparseSum(TopK(density=0.1))), smallest=100),
]
ROUNDED: list[Compressor] = []


def summed(sizes: list[int], world: int, density: float = 0.1) -> float:
    """Entries to the others and sums to all: k/n of each, and two standard deviations more of the former."""
    n, k = sum(sizes), sum(max(1, round(density * size)) for size in sizes)
    block = min(16, n // world)
    rows = math.ceil(n / (world * block)) * block
    sent = min(k, rows, math.ceil(k / world + 2 * math.sqrt(k / world)))
    told = min(n // (world * block) * block, math.ceil(k / world))
    message = 4 + 4 * sent + places(sent, rows) + 4 * told + places(told, rows)
    return min((world - 1) * message, ring(world, 4 * n))


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (SparseSum(TopK(density=0.1)), lambda n: summed(sizes(), n)),
    (Feedback(SparseSum(TopK(density=0.1))), lambda n: summed(sizes(), n)),
    (Feedback(SparseSum(TopK(density=0.6))), lambda n: summed(sizes(), n, 0.6)),
    (Feedback(SparseSum(TopK(density=1.0))), lambda n: ring(n, 4 * sum(sizes()))),
    (
        Route(Feedback(SparseSum(TopK(density=0.1)))),
        lambda n: summed([270, 528], n) + ring(n, 4 * (240 + 20 + 48 + 1)),
    ),
]
