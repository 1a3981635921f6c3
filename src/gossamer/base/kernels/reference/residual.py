"""Residuals: the part that was not sent, before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import all_finite
from gossamer.errors import NotFinite


@dataclass(frozen=True)
class Residual:
    """Both at least float32 for an encoder: see blocks.widened. They may be one tensor, updated in place then."""

    before: Tensor  # the current residual: (n,), read
    after: Tensor  # the next residual: (n,), written
    factor: float = 1.0  # of `before`, if both are narrower than float32; otherwise 1


def both(residual: Residual | None) -> tuple[Tensor, ...]:
    return () if residual is None else (residual.before, residual.after)


def wanted(x: Tensor, residual: Residual | None) -> Tensor:
    """Return x plus the residual: (n,), at least in float32. Raises NotFinite if a value cannot be sent."""
    found = x.to(torch.promote_types(x.dtype, torch.float32)) if residual is None else x + residual.before
    if not all_finite(found):
        raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")
    return found
