"""Compression between nodes only, here of one worker each, which any number of workers make. Larger ones have tests of
their own, beside the compressor."""

from __future__ import annotations

from collections.abc import Callable

from laws.formulas import ring, sizes, sparse

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, Hierarchical, TopK
from gossamer.algorithms.compressors.int8 import Int8

EXACT: list[Compressor] = [
    Hierarchical(Feedback(TopK(density=0.1)), per_node=1),
    Feedback(Hierarchical(Int8(block=16), per_node=1)),
]
ROUNDED: list[Compressor] = [Hierarchical(Dense(dtype="bfloat16"), per_node=1)]

FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (Hierarchical(Dense(), per_node=1), lambda n: ring(n, 4 * sum(sizes())) + n - 1),
    (Hierarchical(Feedback(TopK(density=0.1)), per_node=1), lambda n: (n - 1) * (sparse(sizes()) + 1)),
]
