"""Matrices as two thin factors, x ~ p q^T: all matrices of a bucket in one call.

Values that all workers compute from the same answers (orthonormal columns, and p q^T) are summed in one fixed order,
with the same bits everywhere. Values that one worker computes from its own input and then sends (x q and x^T p) have
the order of its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import within_range
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns
from gossamer.base.kernels.reference.residual import Residual
from gossamer.errors import NotFinite


@dataclass(frozen=True)
class Place:
    """A tensor in its buffer, and the offsets of its factors in theirs: `left` p, and `right` q.

    A tensor that is not a matrix has no rows; its entries are then at `left`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    rows: int
    columns: int
    left: int
    right: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def is_row_major(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.at)

    def entries(self, flat: Tensor) -> Tensor:
        """In memory order: (numel,)."""
        return flat[self.at : self.at + self.numel]

    def follows(self, other: Place) -> bool:
        """Whether this matrix is directly behind another of its shape, both row by row."""
        alike = (self.rows, self.columns) == (other.rows, other.columns) and self.at == other.at + other.numel
        return alike and self.is_row_major and other.is_row_major


@dataclass(frozen=True)
class Run:
    """Matrices of one shape, side by side, and so are their factors: batches, which are multiplied together."""

    places: tuple[Place, ...]
    rank: int

    def matrices(self, flat: Tensor) -> Tensor:
        """Return (batch, rows, columns): a view, or a copy of a matrix that is not stored row by row."""
        first, batch = self.places[0], len(self.places)
        if not first.is_row_major:
            return first.view(flat).reshape(1, first.rows, first.columns)
        return flat[first.at : first.at + batch * first.numel].view(batch, first.rows, first.columns)

    def write(self, matrices: Tensor, flat: Tensor) -> None:
        first = self.places[0]
        if first.is_row_major:
            self.matrices(flat).copy_(matrices)
        else:
            first.view(flat).copy_(matrices.view(first.shape))

    def left(self, factors: Tensor) -> Tensor:
        """p: (batch, rows, rank)"""
        return self._thin(factors, self.places[0].left, self.places[0].rows)

    def right(self, factors: Tensor) -> Tensor:
        """q: (batch, columns, rank)"""
        return self._thin(factors, self.places[0].right, self.places[0].columns)

    def _thin(self, factors: Tensor, at: int, rows: int) -> Tensor:
        batch = len(self.places)
        return factors[at : at + batch * rows * self.rank].view(batch, rows, self.rank)


@dataclass(frozen=True)
class Factoring:
    """Which tensors of a buffer are cut into factors, and where those lie: all p and then all other tensors in one
    buffer, which is sent first, and all q in another."""

    rank: int
    places: tuple[Place, ...]

    @classmethod
    def of(
        cls, rank: int, tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]], cut: Sequence[bool]
    ) -> Factoring:
        """Tensors: (shape, stride, place in the buffer); those `cut` are seen as (first dimension, everything else)."""
        sizes = [
            (shape[0], prod(shape[1:])) if each else (0, prod(shape))
            for (shape, *_), each in zip(tensors, cut, strict=True)
        ]
        left, right, other = 0, 0, rank * sum(rows for rows, _ in sizes)
        places: list[Place] = []
        for (shape, stride, at), (rows, columns) in zip(tensors, sizes, strict=True):
            places.append(Place(shape, stride, at, rows, columns, left if rows else other, right))
            left += rank * rows
            right += rank * columns * bool(rows)
            other += columns * (not rows)
        return cls(rank, tuple(places))

    @cached_property
    def matrices(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.rows)

    @cached_property
    def others(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if not place.rows)

    @cached_property
    def left_numel(self) -> int:
        """Numbers of all p."""
        return self.rank * sum(place.rows for place in self.matrices)

    @cached_property
    def first_numel(self) -> int:
        """Numbers of all p and of all other tensors."""
        return self.left_numel + sum(place.numel for place in self.others)

    @cached_property
    def right_numel(self) -> int:
        """Numbers of all q."""
        return self.rank * sum(place.columns for place in self.matrices)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        number, numbers = 0, [0] * bool(self.matrices)
        for one, next_one in pairwise(self.matrices):
            number += not next_one.follows(one)
            numbers.append(number)
        by_run = groupby(zip(numbers, self.matrices, strict=True), key=lambda each: each[0])
        return tuple(Run(tuple(place for _, place in run), self.rank) for _, run in by_run)


def project(x: Tensor, factoring: Factoring, q: Tensor, terms: float, residual: Residual | None = None) -> Tensor:
    """Return p = w q of every matrix, and the other tensors: (first_numel,) in q's dtype.

    w = x, or x + residual.before, which is written to residual.after. Raises NotFinite if w has a NaN or a value so
    large that a sum of `terms` such values could overflow.
    """
    w = x.to(q.dtype) if residual is None else torch.add(x, residual.before, out=residual.after)
    if not within_range(w, terms):
        raise NotFinite("a number is not finite, or too large for sums over the group")
    first = q.new_empty(factoring.first_numel)
    for run in factoring.runs:
        torch.bmm(run.matrices(w), run.right(q), out=run.left(first))
    for place in factoring.others:
        first[place.left : place.left + place.numel].copy_(place.entries(w))
    return first


def back_project(w: Tensor, factoring: Factoring, first: Tensor, left: Tensor | None = None) -> Tensor:
    """Return q = w^T p of every matrix: (right_numel,) in the dtype of `first`, with orthonormal p.

    left: receives the error of the factors, w - p q^T, and zero for other tensors; it may be w.
    """
    q = first.new_empty(factoring.right_numel)
    for run in factoring.runs:
        torch.bmm(run.matrices(w).to(q.dtype).mT, run.left(first), out=run.right(q))
    if left is not None:
        for run in factoring.runs:
            run.write(run.matrices(w) - _product(run.left(first), run.right(q)), left)
        for place in factoring.others:
            place.entries(left).zero_()
    return q


def expand(factoring: Factoring, first: Tensor, q: Tensor, out: Tensor) -> None:
    """Overwrite `out`: (n,) with p q^T of every matrix, and with the other tensors."""
    for run in factoring.runs:
        run.write(_product(run.left(first), run.right(q)), out)
    for place in factoring.others:
        place.entries(out).copy_(first[place.left : place.left + place.numel])


def orthonormalize(factoring: Factoring, first: Tensor) -> None:
    """Every p becomes orthonormal columns that span its own; a column that adds nothing becomes a unit vector."""
    if first.is_meta or not factoring.matrices:
        return
    views = [thin for run in factoring.runs for thin in run.left(first)]
    for view, found in zip(views, orthonormal_columns(views), strict=True):
        view.copy_(found)


def _product(p: Tensor, q: Tensor) -> Tensor:
    """p q^T, column after column of both: (batch, rows, columns). No library promises such an order of its products."""
    terms = _outer_products(p, q)
    found = next(terms)
    for term in terms:
        found += term
    return found


def _outer_products(p: Tensor, q: Tensor) -> Iterator[Tensor]:
    for k in range(p.shape[2]):
        yield p[:, :, k : k + 1] * q[:, :, k].unsqueeze(1)
