"""Wanted numbers within kernels: x plus what is still owed, and magnitudes as integers of the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.rows import widened

INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the magnitude of infinity; NaN's are above it


@triton.jit
def wanted(x, before, place, inside, owes: tl.constexpr):
    """w = x + before in float32, rounded once; x where nothing is owed. Zero where not `inside`."""
    number = widened(tl.load(x + place, mask=inside, other=0))
    if owes:
        number = number + tl.load(before + place, mask=inside, other=0.0)
    return number


@triton.jit
def magnitude(number):
    """|number| as int32, which orders as |number| does: no sign, so that -0.0 is 0.0."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
