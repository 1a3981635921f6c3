"""Bytes per worker and step over laws.SHAPES, written down once more and apart from the library."""

from __future__ import annotations

import math

from laws.laws import SHAPES


def sizes() -> list[int]:
    return [math.prod(shape) for shape in SHAPES.values()]


def ring(world: int, size: float) -> float:
    return 2 * (world - 1) * size / world


def places(k: int, n: int) -> int:
    """Elias and Fano's code for k of n places, or a bitmap."""
    code = min(math.ceil(k * low / 8) + math.ceil((k + ((n - 1) >> low)) / 8) for low in range(31))
    return min(code, math.ceil(n / 8))


def sparse(sizes: list[int], density: float = 0.1) -> int:
    """Values and places of the largest entries of tensors of these sizes."""
    k = sum(max(1, round(density * size)) for size in sizes)
    return 4 * k + places(k, sum(sizes))


def low_rank_elements(rank: int) -> int:
    total = 0
    for shape in SHAPES.values():
        rows, cols = shape[0], math.prod(shape[1:])
        thin = len(shape) > 1 and rank * (rows + cols) < rows * cols
        total += rank * (rows + cols) if thin else math.prod(shape)
    return total


def projected_elements(rank: int) -> int:
    """One factor, as long as the longer side, of every matrix whose shorter side is above the rank."""
    total = 0
    for shape in SHAPES.values():
        sides = sorted([shape[0], math.prod(shape[1:])]) if len(shape) > 1 else [0]
        total += rank * sides[1] if sides[0] > rank else math.prod(shape)
    return total
