"""Thin factors by compiled loops; unsupported inputs use plain torch.

The products with one worker's input (x q, x^T p) are rounded in another order there; all else has the same bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import empty
from gossamer.base.kernels.library import Count, Function, Pointer, address, counts_array, kernel, serves
from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual

_PROJECT = Function(
    "gossamer_low_rank_project", *[Pointer] * 3, Count, Pointer, Count, Count, Pointer, ctypes.c_float, Pointer
)
_BACK = Function("gossamer_low_rank_back", Pointer, Count, Pointer, Count, Count, *[Pointer] * 3)
_EXPAND = Function("gossamer_low_rank_expand", Count, Pointer, Count, Count, *[Pointer] * 3)
_ORTHONORMAL = Function("gossamer_orthonormal", *[Pointer] * 2, Count, Count)


@kernel(truth.project)
def project(x: Tensor, factoring: Factoring, q: Tensor, terms: float, residual: Residual | None = None) -> Tensor:
    tensors_of = () if residual is None else (residual.before, residual.after)
    table = _table(factoring)
    if not (table.serves(x, *tensors_of) and table.holds(q, factoring.right_numel)):
        return truth.project(x, factoring, q, terms, residual)
    first = empty(factoring.first_numel, torch.float32)
    limit = torch.finfo(x.dtype).max / terms
    buffers = address(x), *map(address, tensors_of or (None, None)), len(x)
    _PROJECT(*buffers, *table.arguments, address(q), limit, address(first))
    return first


@kernel(truth.back_project)
def back_project(w: Tensor, factoring: Factoring, first: Tensor, left: Tensor | None = None) -> Tensor:
    table = _table(factoring)
    if not (table.serves(w, *(() if left is None else (left,))) and table.holds(first, factoring.first_numel)):
        return truth.back_project(w, factoring, first, left)
    q = empty(factoring.right_numel, torch.float32)
    _BACK(address(w), len(w), *table.arguments, address(first), address(q), address(left))
    return q


@kernel(truth.expand)
def expand(factoring: Factoring, first: Tensor, q: Tensor, out: Tensor) -> None:
    table = _table(factoring)
    thin = table.holds(first, factoring.first_numel) and table.holds(q, factoring.right_numel)
    if not (table.serves(out) and thin):
        return truth.expand(factoring, first, q, out)
    _EXPAND(len(out), *table.arguments, address(first), address(q), address(out))
    return None


@kernel(truth.orthonormalize)
def orthonormalize(factoring: Factoring, first: Tensor) -> None:
    table = _table(factoring)
    if not (table.tall and table.holds(first, factoring.first_numel)):
        return truth.orthonormalize(factoring, first)
    _ORTHONORMAL(address(first), *table.arguments)
    return None


class _Table:
    """A factoring as arguments of compiled loops, and the buffers that they support."""

    def __init__(self, factoring: Factoring) -> None:
        self.factoring = factoring
        numbers = [(each.at, each.rows, each.columns, each.left, each.right) for each in factoring.places]
        self._numbers = counts_array([number for each in numbers for number in each])
        self.arguments = self._numbers, len(factoring.places), factoring.rank
        self.tall = all(place.rows >= factoring.rank for place in factoring.matrices)
        self._are_row_major = all(place.is_row_major for place in factoring.matrices)
        self._numel = sum(place.numel for place in factoring.places)

    def serves(self, *buffers: Tensor) -> bool:
        return self._are_row_major and all(self.holds(buffer, self._numel) for buffer in buffers)

    def holds(self, buffer: Tensor, numel: int) -> bool:
        return buffer.shape == (numel,) and serves(buffer, types=(torch.float32,))


_latest: dict[int, _Table] = {}


def _table(factoring: Factoring) -> _Table:
    """A factoring is one object at every step: found by its identity, it is not even hashed."""
    found = _latest.get(id(factoring))
    if found is not None and found.factoring is factoring:
        return found
    if len(_latest) >= 256:
        _latest.clear()
    return _latest.setdefault(id(factoring), _Table(factoring))
