"""Thin factors on a GPU: elementwise parts in one pass over all tensors; the products with w are a library's.

p q^T is added up column after column of both, as plain torch does it; x q and x^T p are one worker's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.triton.block_table import BlockTable, block_table
from gossamer.base.kernels.triton.launch import EXACT, serves
from gossamer.base.kernels.triton.rows import row_sums
from gossamer.base.kernels.triton.status import OUT_OF_RANGE, found, fresh, report
from gossamer.base.kernels.triton.wanted import store_residual, tensors_of, wanted
from gossamer.errors import NotFinite

BLOCK = 1024  # entries of a buffer that a program serves


@dataclass(frozen=True)
class FactorTable:
    """Of each tensor: (tensors,) int32."""

    factoring: Factoring
    blocks: BlockTable  # of the whole buffer
    ats: Tensor  # where it begins in the buffer
    columns: Tensor  # zero where the tensor is no matrix
    lefts: Tensor  # where its p begins, or its entries where it is no matrix
    rights: Tensor  # where its q begins
    numel: int
    plain: bool  # whether tensors lie side by side, each row by row

    @classmethod
    def of(cls, factoring: Factoring, device: torch.device) -> FactorTable:
        places = factoring.places
        sizes = [place.numel for place in places]
        starts = list(accumulate(sizes, initial=0))
        plain = all(place.is_row_major for place in factoring.matrices)
        numbers = [(each.at, each.columns if each.rows else 0, each.left, each.right) for each in places]
        each = torch.tensor(numbers, dtype=torch.int64).view(-1, 4).t().contiguous()
        ats, columns, lefts, rights = each.to(device, torch.int32)  # kernels serve fewer than 2^31 entries
        return cls(
            factoring=factoring,
            blocks=block_table(sizes, BLOCK, device),
            ats=ats,
            columns=columns,
            lefts=lefts,
            rights=rights,
            numel=starts[-1],
            plain=plain and [place.at for place in places] == starts[:-1],
        )

    def serves(self, *buffers: Tensor) -> bool:
        return self.plain and all(holds(buffer, self.numel) for buffer in buffers)


def holds(buffer: Tensor, numel: int) -> bool:
    return buffer.shape == (numel,) and serves(buffer, types=(torch.float32,))


_latest: dict[tuple[int, torch.device], FactorTable] = {}


def factor_table(factoring: Factoring, device: torch.device) -> FactorTable:
    """A factoring is one object at every step: found by its identity, it is not even hashed."""
    found = _latest.get((id(factoring), device))
    if found is not None and found.factoring is factoring:
        return found
    if len(_latest) >= 256:
        _latest.clear()
    made = _latest[id(factoring), device] = FactorTable.of(factoring, device)
    return made


# -- the product with q, and the residual ------------------------------------------------------------------------------


@triton.jit
def _weigh(
    x, before, after, first, starts, lengths, owners, ats, columns, lefts, status, limit, block: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0)
    owner, place = tl.load(owners + number), tl.load(starts + number) + tl.arange(0, block)
    inside = tl.arange(0, block) < tl.load(lengths + number)
    w = wanted(x, before, place, inside)
    report(status, ~(tl.abs(w) <= limit), OUT_OF_RANGE)
    store_residual(after, w, place, inside)
    if tl.load(columns + owner) == 0:
        tl.store(first + tl.load(lefts + owner) + place - tl.load(ats + owner), w, mask=inside)


def project(x: Tensor, factoring: Factoring, q: Tensor, terms: float, residual: Residual | None = None) -> Tensor:
    """As reference.low_rank.project."""
    table = factor_table(factoring, x.device)
    if not (table.serves(x, *both(residual)) and holds(q, factoring.right_numel)):
        return truth.project(x, factoring, q, terms, residual)
    w = x if residual is None else residual.after
    first, status, blocks = q.new_empty(factoring.first_numel), fresh(x.device), table.blocks
    if len(blocks):
        _weigh[(len(blocks),)](
            x, *tensors_of(residual), first, blocks.starts, blocks.lengths, blocks.owners, table.ats, table.columns,
            table.lefts, status, torch.finfo(x.dtype).max / terms, block=blocks.block, **EXACT,
        )  # fmt: skip
    for run in factoring.runs:
        torch.bmm(run.matrices(w), run.right(q), out=run.left(first))
    if found(status):
        raise NotFinite("a number is not finite, or too large for sums over the group")
    return first


@triton.jit
def _product(p, q, row, column, rank, inside):
    """One entry of p q^T each: rank products, each rounded before it is added."""
    p, q = p + row * rank, q + column * rank
    entry = tl.load(p, mask=inside, other=0.0) * tl.load(q, mask=inside, other=0.0)
    for k in range(1, rank):
        entry = entry + tl.load(p + k, mask=inside, other=0.0) * tl.load(q + k, mask=inside, other=0.0)
    return entry


@triton.jit
def _expand(
    first, q, w, out, starts, lengths, owners, ats, columns, lefts, rights, rank,
    remains: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    owner, place = tl.load(owners + number), tl.load(starts + number) + tl.arange(0, block)
    inside = tl.arange(0, block) < tl.load(lengths + number)
    entry, width, p = place - tl.load(ats + owner), tl.load(columns + owner), first + tl.load(lefts + owner)
    if width == 0:
        if remains:
            tl.store(out + place, tl.zeros((block,), tl.float32), mask=inside)
        else:
            tl.store(out + place, tl.load(p + entry, mask=inside, other=0.0), mask=inside)
    else:
        product = _product(p, q + tl.load(rights + owner), entry // width, entry % width, rank, inside)
        if remains:
            product = tl.load(w + place, mask=inside, other=0.0) - product
        tl.store(out + place, product, mask=inside)


@dataclass(frozen=True)
class _Factors:
    table: FactorTable
    first: Tensor
    q: Tensor

    def write(self, out: Tensor, w: Tensor | None = None) -> None:
        """Write p q^T and the other tensors; or the error relative to w."""
        table, blocks = self.table, self.table.blocks
        if len(blocks):
            _expand[(len(blocks),)](
                self.first, self.q, out if w is None else w, out, blocks.starts, blocks.lengths, blocks.owners,
                table.ats, table.columns, table.lefts, table.rights, table.factoring.rank,
                remains=w is not None, block=blocks.block, **EXACT,
            )  # fmt: skip


def back_project(w: Tensor, factoring: Factoring, first: Tensor, left: Tensor | None = None) -> Tensor:
    """As reference.low_rank.back_project."""
    table = factor_table(factoring, w.device)
    if left is None or not (table.serves(w, left) and holds(first, factoring.first_numel)):
        return truth.back_project(w, factoring, first, left)
    q = truth.back_project(w, factoring, first)
    _Factors(table, first, q).write(left, w)
    return q


def expand(factoring: Factoring, first: Tensor, q: Tensor, out: Tensor) -> None:
    """As reference.low_rank.expand."""
    table = factor_table(factoring, out.device)
    thin = holds(first, factoring.first_numel) and holds(q, factoring.right_numel)
    if not (table.serves(out) and thin):
        return truth.expand(factoring, first, q, out)
    return _Factors(table, first, q).write(out)


# -- orthonormal columns: a program for each matrix, and the order of sums of reference/gram_schmidt -------------------

# A sum by halves has the same bits however many zeros follow, so each matrix has its own power of two of rows.

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
    for view, columns in zip(views, orthonormal_columns(views), strict=True):
        view.copy_(columns)


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
