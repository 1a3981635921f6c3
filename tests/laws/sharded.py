"""Compressed reduce-scatter and all-gather. Subjects of the laws, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from laws.formulas import places, ring, sizes

from gossamer.algorithms.compressors import Compressor, Feedback, Route, Sharded, TopK
from gossamer.algorithms.compressors.int8 import Int8

EXACT: list[Compressor] = [
    Sharded(Int8(block=16)),
    Feedback(Sharded(Int8(block=16))),
    Sharded(TopK(density=0.1)),
    Feedback(Sharded(TopK(density=0.1))),
    Feedback(Sharded(TopK(density=1.0))),
    Route(Feedback(Sharded(Int8())), smallest=100),
    Feedback(Route(Sharded(Int8()))),
]
ROUNDED: list[Compressor] = []


def pieces(sizes: list[int], world: int) -> list[list[int]]:
    """The tensors' pieces in each of `world` parts of ceil(N / world) entries, the last ones shorter."""
    owners = [place // math.ceil(sum(sizes) / world) for place in range(sum(sizes))]
    found, start = [[] for _ in range(world)], 0
    for size in sizes:
        counts = [owners[start : start + size].count(rank) for rank in range(world)]
        for part, count in zip(found, counts, strict=True):
            part += [count] if count else []
        start += size
    return found


def int8_both_ways(sizes: list[int], world: int, block: int) -> float:
    parts = pieces(sizes, world)
    scales = max(sum(math.ceil(piece / block) for piece in part) for part in parts)
    return 2 * (world - 1) * (max(map(sum, parts)) + 4 * scales)


def top_tenth_both_ways(sizes: list[int], world: int) -> float:
    kept = [(sum(max(1, round(0.1 * piece)) for piece in part), sum(part)) for part in pieces(sizes, world)]
    return 2 * (world - 1) * (4 * max(k for k, _ in kept) + max(places(k, n) for k, n in kept if n))


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (Sharded(Int8(block=16)), lambda n: int8_both_ways(sizes(), n, 16)),
    (Feedback(Sharded(Int8(block=16))), lambda n: int8_both_ways(sizes(), n, 16)),
    (Feedback(Sharded(TopK(density=0.1))), lambda n: top_tenth_both_ways(sizes(), n)),
    (
        Route(Feedback(Sharded(Int8(block=16)))),
        lambda n: int8_both_ways([270, 528], n, 16) + ring(n, 4 * (240 + 20 + 48 + 1)),
    ),
]
