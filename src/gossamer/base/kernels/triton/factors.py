"""Thin factors on a GPU: elementwise parts in one pass over all tensors; the products with w are a library's.

p q^T is added up column after column of both, as plain torch does it; x q and x^T p are one worker's own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.triton.factor_table import FactorTable, factor_table, holds
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.status import OUT_OF_RANGE, found, fresh, report
from gossamer.base.kernels.triton.wanted import store_residual, tensors_of, wanted
from gossamer.errors import NotFinite


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
