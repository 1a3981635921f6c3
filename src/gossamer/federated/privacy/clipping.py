"""Clipping: scales all tensors of a contribution together, so that their common norm is at most a bound."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch
from torch import Tensor

from gossamer.errors import NotFinite

ROUNDING = 1e-12  # below the bound, so that rounded numbers stay within it, too


def common_norm(blocks: Sequence[Tensor]) -> float:
    """The Euclidean norm of all of them together, in float64 and without overflow. Raises NotFinite."""
    sizes = [float(block.abs().max()) for block in blocks if block.numel()]
    if not all(map(isfinite, sizes)):  # before max() and min(), which make a number of NaN
        raise NotFinite("a contribution holds numbers that are not finite, so it has no norm to clip")
    largest = max(sizes, default=0.0)
    if largest == 0:
        return 0.0
    return largest * sqrt(sum(float((block.double() / largest).square().sum()) for block in blocks))


def clip_factor(norm: float, bound: float) -> float:
    """min(1, bound / norm), a hair less where it is below 1; 1 for a norm of 0, 0 for one too large for a float."""
    return 1.0 if norm <= bound else bound / norm * (1 - ROUNDING)


def clipped(blocks: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """Fresh tensors in float64 of a common norm of at most `bound`. Raises NotFinite."""
    factor = clip_factor(common_norm(blocks), bound)
    return tuple(torch.mul(block.double(), factor) for block in blocks)
