"""Walsh-Hadamard transform: sums and differences that spread every entry over its block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import all_finite


def hadamard(x: Tensor, sizes: Sequence[int], block: int, signs: Tensor, out: Tensor, *, inverse: bool = False) -> bool:
    """Overwrite `out`: (n,) with H S x / sqrt(m), or with its inverse S H x / sqrt(m). Whether it is finite.

    H: (m, m), entries 1 and -1, symmetric, H H = m; S: diagonal, the first m of `signs`: (block,), 1 or -1. So with
    every block of m = `block` entries, a power of two; the rest of a tensor is cut into powers of two, the largest
    first. `out` may be x itself.
    """
    for start, stop, length in spans(sizes, block):
        rows, sign = x[start:stop].view(-1, length), signs[:length].to(x.dtype)
        scale = 1 / sqrt(length)
        found = _levels(rows * scale) * sign if inverse else _levels(rows * sign * scale)
        out[start:stop] = found.view(-1)
    return all_finite(out)


def spans(sizes: Sequence[int], block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, length of the blocks in between)"""
    place = 0
    for size in sizes:
        stop, length = place + size, block
        while place < stop:
            whole = (stop - place) // length * length
            if whole:
                yield place, place + whole, length
            place, length = place + whole, length // 2


def _levels(rows: Tensor) -> Tensor:
    """(blocks, m) -> (blocks, m): sums and differences of entries 1 apart, then 2, then 4."""
    blocks, length = rows.shape
    distance = 1
    while distance < length:
        pairs = rows.view(blocks, -1, 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([first + second, first - second], 2).view(blocks, length)
        distance *= 2
    return rows
