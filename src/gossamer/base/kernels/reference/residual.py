"""Residuals: the part that was not sent, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import scratch_like
from gossamer.base.kernels.reference.finite import all_finite
from gossamer.errors import NotFinite


@dataclass(frozen=True)
class Residual:
    """Both at least float32 for an encoder; see `widened`. They may be one tensor, which is then updated in place."""

    before: Tensor  # the current residual: (n,), read
    after: Tensor  # the next residual: (n,), written
    factor: float = 1.0  # of `before`, if both are narrower than float32; otherwise 1


@contextmanager
def widened(residual: Residual | None) -> Iterator[Residual | None]:
    """Context manager: a residual for an encoder. One that is narrower than float32 is widened into scratch memory,
    times its factor, and rounded when the encoder is done."""
    if residual is None or residual.before.dtype.itemsize >= torch.float32.itemsize:
        yield residual
        return
    wide = scratch_like(residual.before, torch.float32).copy_(residual.before)
    if residual.factor != 1:
        wide.mul_(residual.factor)
    yield Residual(wide, wide)
    residual.after.copy_(wide)


def both(residual: Residual | None) -> tuple[Tensor, ...]:
    return () if residual is None else (residual.before, residual.after)


def wanted(x: Tensor, residual: Residual | None) -> Tensor:
    """Return x plus the residual: (n,), at least in float32. Raises NotFinite if a value cannot be sent."""
    found = x.to(torch.promote_types(x.dtype, torch.float32)) if residual is None else x + residual.before
    if not all_finite(found):
        raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")
    return found
