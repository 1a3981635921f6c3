"""Discrete cosine transform of matrices in blocks, by products with small matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import pi, sqrt

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import all_finite

AT_ONCE = 2**18  # entries, so that intermediate products fit into the caches
ROUNDING = 1e-15  # entries of the basis below it are zeros with a rounding error of cos()

Shape = tuple[int, int]


def dct(x: Tensor, shapes: Sequence[Shape], block: int, out: Tensor, *, inverse: bool = False) -> bool:
    """Overwrite `out`: (n,) with D_h X D_w^T of every block X: (h, w), or with the inverse. Whether it is
    finite.

    D_h: (h, h), the orthonormal DCT-II. The matrices of `shapes` lie side by side in x: (n,). A dimension is cut into
    whole blocks and a shorter last one. `out` may be x itself.
    """
    for start, period, count, (rows, cols) in _runs(tuple(shapes)):
        size, stride = (count, rows, cols), (period, cols, 1)
        source = x.as_strided(size, stride, x.storage_offset() + start)
        target = out.as_strided(size, stride, out.storage_offset() + start)
        for tensors, lines in _pieces(count, rows, cols, block):
            found = _across(_down(source[tensors, lines], block, inverse), block, inverse)
            target[tensors, lines] = found
    return all_finite(out)


@lru_cache(maxsize=256)
def _runs(shapes: tuple[Shape, ...]) -> tuple[tuple[int, int, int, Shape], ...]:
    """(start, period, count, shape): matrices of one shape, each `period` entries after the last, are done together."""
    starts: dict[Shape, list[int]] = {}
    place = 0
    for rows, cols in shapes:
        if rows * cols:
            starts.setdefault((rows, cols), []).append(place)
        place += rows * cols
    return tuple((*run, shape) for shape, places in starts.items() for run in _progressions(places))


def _progressions(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, period, count) of ascending places, cut where the distance changes."""
    first = 0
    while first < len(places):
        last = first + 1
        period = places[last] - places[first] if last < len(places) else 0
        while last < len(places) and places[last] - places[last - 1] == period:
            last += 1
        yield places[first], period, last - first
        first = last


def _pieces(count: int, rows: int, cols: int, block: int) -> Iterator[tuple[slice, slice]]:
    """(which matrices, which of their rows) to do at once: whole blocks."""
    lines = max(block, AT_ONCE // cols // block * block)
    tensors = max(1, AT_ONCE // (rows * cols))
    for first in range(0, count, tensors):
        for line in range(0, rows, lines):
            yield slice(first, first + tensors), slice(line, line + lines)


def _down(x: Tensor, block: int, inverse: bool) -> Tensor:
    """(matrices, rows, cols), every column of a block transformed."""
    rows = x.shape[1]
    if rows == 1:
        return x
    whole = rows // block * block
    parts = [_basis(block, x.dtype, x.device, inverse) @ x[:, :whole].unflatten(1, (-1, block))] if whole else []
    found = [part.flatten(1, 2) for part in parts]
    if whole < rows:
        found.append(_basis(rows - whole, x.dtype, x.device, inverse) @ x[:, whole:])
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _across(x: Tensor, block: int, inverse: bool) -> Tensor:
    """(matrices, rows, cols), every row of a block transformed."""
    cols = x.shape[2]
    whole = cols // block * block
    parts = [x[..., :whole].unflatten(2, (-1, block)) @ _basis(block, x.dtype, x.device, inverse).T] if whole else []
    found = [part.flatten(2, 3) for part in parts]
    if whole < cols:
        found.append(x[..., whole:] @ _basis(cols - whole, x.dtype, x.device, inverse).T)
    return found[0] if len(found) == 1 else torch.cat(found, 2)


@lru_cache(maxsize=256)
def _basis(length: int, dtype: torch.dtype, device: torch.device, inverse: bool) -> Tensor:
    """(length, length): one cosine a row, or a column for the way back."""
    numbers = torch.arange(length, dtype=torch.float64, device="cpu")
    waves = torch.cos(pi / length * numbers[:, None] * (numbers + 0.5)) * sqrt(2 / length)
    waves[0] = sqrt(1 / length)
    waves[waves.abs() < ROUNDING] = 0
    return (waves.T if inverse else waves).contiguous().to(device=device, dtype=dtype)
