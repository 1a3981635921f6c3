"""The inner loops in plain torch: the truth that faster ones must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def within_range(x: Tensor, terms: int) -> bool:
    """Whether x holds no NaN and nothing so large that a sum of `terms` such numbers could leave its dtype's range."""
    if x.is_meta or not x.numel():
        return True
    low, high = torch.aminmax(x)
    limit = torch.finfo(x.dtype).max / terms
    return bool(-limit <= low) and bool(high <= limit)  # both are False for NaN


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity; True on meta tensors.

    A sum takes one pass and is finite only if every number is (NaN and infinity survive any sum). Only a sum that is
    not (it may merely have overflowed) makes the exact test necessary, which costs ten times as much.
    """
    if x.is_meta:
        return True
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """For each (rows, rank) matrix, orthonormal columns that span its columns; a column that adds nothing to those
    before it becomes a unit vector.

    Modified Gram-Schmidt, with every sum taken in one fixed order: workers with other processors, libraries or numbers
    of threads come to the same bits, which a library's QR does not promise. All matrices in one go, in float64.
    """
    if factors[0].is_meta:
        return list(factors)
    rows = 1 << (max(len(factor) for factor in factors) - 1).bit_length()
    columns = torch.stack([pad(factor.double(), (0, 0, 0, rows - len(factor))) for factor in factors])
    sizes = _fixed_sum(columns.square()).sqrt_()
    for j in range(columns.shape[2]):
        column = columns[:, :, j : j + 1]
        norm = _fixed_sum(column.square()).sqrt_()
        dead = norm <= 1e-10 * sizes[:, :, j : j + 1]
        if dead.any():
            unit = _unit_outside(columns[:, :, :j], j)
            column.copy_(torch.where(dead, unit, column))
            norm = torch.where(dead, _fixed_sum(unit.square()).sqrt_(), norm)
        column.div_(torch.where(norm == 0, 1.0, norm))
        later = columns[:, :, j + 1 :]
        later.sub_(column * _fixed_sum(column * later))
    return [found[: len(factor)].to(factor.dtype) for found, factor in zip(columns, factors, strict=True)]


def _fixed_sum(x: Tensor) -> Tensor:
    """(batch, rows, k) -> (batch, 1, k), rows a power of two: halves are added until one is left."""
    while x.shape[1] > 1:
        upper, lower = x.chunk(2, dim=1)
        x = upper + lower
    return x


def _unit_outside(columns: Tensor, j: int) -> Tensor:
    """The j-th unit vector less its part in the span of orthonormal `columns`: (batch, rows, 1)."""
    unit = torch.zeros_like(columns[:, :, :1]) if columns.shape[2] else columns.new_zeros(*columns.shape[:2], 1)
    unit[:, j] = 1.0
    for i in range(columns.shape[2]):
        unit = unit - columns[:, :, i : i + 1] * columns[:, j : j + 1, i : i + 1]
    return unit
