"""Orthonormal columns on a GPU: a program for each matrix, and the order of sums of reference/gram_schmidt.

A sum by halves has the same bits however many zeros follow, so each matrix has its own power of two of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.triton.factor_table import holds
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.rows import row_sums

MOST_ROWS = 2**13  # of a column that one program holds in float64
ROWS_OF_A_WARP = 256


@triton.jit
def _total(x, filled: tl.constexpr):
    """Return the sum by halves, including the zeros that plain torch pads a matrix with next to a larger one."""
    found = tl.sum(row_sums(x[None, :]), 0)
    if filled:
        found = found + 0.0
    return found


@triton.jit
def _orthonormalize(first, lefts, rows, work, rank, filled: tl.constexpr, length: tl.constexpr):
    matrix, row = tl.program_id(0), tl.arange(0, length)
    inside = row < tl.load(rows + matrix)
    p = first + tl.load(lefts + matrix) + row * rank
    columns = work + matrix.to(tl.int64) * rank * length
    for j in range(rank):
        column = tl.load(p + j, mask=inside, other=0.0).to(tl.float64)
        size = tl.sqrt(_total(column * column, filled))
        for i in range(j):
            earlier = tl.load(columns + i * length + row)
            column = column - earlier * _total(earlier * column, filled)
        norm = tl.sqrt(_total(column * column, filled))
        if norm <= size * 1e-10:
            column = (row == j).to(tl.float64)
            for i in range(j):
                earlier = columns + i * length
                column = column - tl.load(earlier + row) * tl.load(earlier + j)
            norm = tl.sqrt(_total(column * column, filled))
        column = column / tl.where(norm == 0.0, 1.0, norm)
        tl.store(columns + j * length + row, column)
        tl.debug_barrier()  # other threads read it
        tl.store(p + j, column.to(tl.float32), mask=inside)


def orthonormalize(factoring: Factoring, first: Tensor) -> None:
    """As reference.low_rank.orthonormalize."""
    matrices, rank = factoring.matrices, factoring.rank
    tall = all(place.rows >= rank for place in matrices)
    if not (tall and matrices and holds(first, factoring.first_numel)):
        return truth.orthonormalize(factoring, first)
    largest = _power(max(place.rows for place in matrices))
    lying = tuple((place.rows, place.left) for place in matrices if place.rows <= MOST_ROWS)
    for length, rows, lefts in _by_length(lying, first.device):
        work = torch.empty(len(rows) * rank * length, dtype=torch.float64, device=first.device)
        warps = max(1, min(16, length // ROWS_OF_A_WARP))
        _orthonormalize[(len(rows),)](
            first, lefts, rows, work, rank, filled=length < largest, length=length, num_warps=warps, **EXACT
        )  # fmt: skip
    return _plainly([place for place in matrices if place.rows > MOST_ROWS], rank, first)


def _plainly(matrices: Sequence[truth.Place], rank: int, first: Tensor) -> None:
    """Those that no program holds."""
    if not matrices:
        return
    views = [first[each.left : each.left + each.rows * rank].view(each.rows, rank) for each in matrices]
    for view, found in zip(views, orthonormal_columns(views), strict=True):
        view.copy_(found)


@lru_cache(maxsize=256)
def _by_length(lying: tuple[tuple[int, int], ...], device: torch.device) -> list[tuple[int, Tensor, Tensor]]:
    """For every power of two of rows: the matrices' rows, and where they begin: (matrices,) int32 each."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rows, left in lying:
        found.setdefault(_power(rows), []).append((rows, left))
    columns = {length: torch.tensor(each, dtype=torch.int32).t().contiguous() for length, each in found.items()}
    return [(length, *each.to(device)) for length, each in columns.items()]


def _power(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
