"""Kernel helpers for w = x plus the residual, and its magnitudes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference.residual import Residual, both

INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the magnitude of infinity; NaN's are above it


def raw(x: Tensor) -> Tensor:
    """x as kernels read it: numbers of bfloat16 as their bits, which any GPU widens by a shift."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def tensors_of(residual: Residual | None) -> tuple[Tensor, ...] | tuple[None, None]:
    """Return the residual's buffers as arguments of a kernel."""
    return both(residual) or (None, None)


@triton.jit
def widened(x):
    """float32 numbers, exactly. int16 are the bits of bfloat16."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # a return after a return is compiled, too
        return x.to(tl.float32)


@triton.jit
def wanted(x, before, place, here):
    """Return w = x + before in float32, rounded once; x without `before`. Zero where not `here`."""
    w = widened(tl.load(x + place, mask=here, other=0))
    if before is not None:
        w = w + tl.load(before + place, mask=here, other=0.0)
    return w


@triton.jit
def store_residual(after, left, place, here):
    """Write the residual of w, if there is a buffer for it."""
    if after is not None:
        tl.store(after + place, left, mask=here)


@triton.jit
def magnitude(number):
    """|number| as int32, which orders as |number| does: no sign, so that -0.0 is 0.0."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def signed(negative, size):
    return tl.where(negative, -size, size)
