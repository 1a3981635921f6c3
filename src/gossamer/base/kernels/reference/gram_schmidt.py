"""Gram-Schmidt: orthonormal columns, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def orthonormal_columns(factors: Sequence[Tensor]) -> list[Tensor]:
    """For each (rows, rank) matrix, orthonormal columns that span its columns; a column that adds nothing to those
    before it becomes a unit vector.

    Modified Gram-Schmidt, with every sum taken in one fixed order: workers with other processors, libraries or numbers
    of threads come to the same bits, which a library's QR does not promise. All matrices in one go, in float64.
    """
    if factors[0].is_meta:
        return list(factors)
    rows = 1 << (max(len(factor) for factor in factors) - 1).bit_length()
    columns = torch.stack([pad(factor.double(), (0, 0, 0, rows - len(factor))) for factor in factors])
    sizes = sum_of_halves(columns.square()).sqrt_()
    for j in range(columns.shape[2]):
        column = columns[:, :, j : j + 1]
        norm = sum_of_halves(column.square()).sqrt_()
        dead = norm <= 1e-10 * sizes[:, :, j : j + 1]
        if dead.any():
            unit = _unit_outside(columns[:, :, :j], j)
            column.copy_(torch.where(dead, unit, column))
            norm = torch.where(dead, sum_of_halves(unit.square()).sqrt_(), norm)
        column.div_(torch.where(norm == 0, 1.0, norm))
        later = columns[:, :, j + 1 :]
        later.sub_(column * sum_of_halves(column * later))
    return [found[: len(factor)].to(factor.dtype) for found, factor in zip(columns, factors, strict=True)]


def sum_of_halves(x: Tensor) -> Tensor:
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
