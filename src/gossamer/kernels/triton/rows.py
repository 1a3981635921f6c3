"""Rows: within a kernel, the blocks of a program as a tile of (together, block) entries, and what travels of them."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.status import NOT_FINITE, report

BAD: tl.constexpr = tl.constexpr(NOT_FINITE)
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def located(starts, lengths, blocks, block: tl.constexpr, together: tl.constexpr, even: tl.constexpr):
    """(row, live, length): (together,), the number of each block, whether there is one, and its entries; then
    (place, here): (together, block), where each entry lies, and whether there is one."""
    row = tl.program_id(0) * together + tl.arange(0, together)
    live = row < blocks
    start = tl.multiple_of(tl.load(starts + row, mask=live, other=0), even)
    length = tl.multiple_of(tl.load(lengths + row, mask=live, other=0), even)
    within = tl.arange(0, block)[None, :]
    return row, live, length, start[:, None] + within, within < length[:, None]


@triton.jit
def widened(x):
    """float32 numbers, exactly. int16 are the bits of bfloat16."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # a return after a return is compiled, too
        return x.to(tl.float32)


@triton.jit
def wanted(x, before, place, here, status):
    """w = x + before, or x where that is None; zero beyond the end. Reports what cannot be sent."""
    w = widened(tl.load(x + place, mask=here, other=0))
    if before is not None:
        w = w + tl.load(before + place, mask=here, other=0.0)
    expect_sendable(w, status)
    return w


@triton.jit
def expect_sendable(numbers, status):
    """Report what is not finite among (rows, columns) of numbers."""
    report(status, tl.max((~(tl.abs(numbers) < INFINITY)).to(tl.int32), 1), BAD)


@triton.jit
def owe(after, w, meant, place, here):
    """Write what is left of w, where that is wanted."""
    if after is not None:
        tl.store(after + place, w - meant, mask=here)


@triton.jit
def row_sums(x, together: tl.constexpr, length: tl.constexpr):
    """The sum of each row of x: (together, length), by halves as arithmetic.sum_of_halves takes it."""
    halves = x
    for _ in tl.static_range(14):
        if halves.shape[1] > 1:
            halves = tl.sum(tl.reshape(halves, (together, 2, halves.shape[1] // 2)), 1)  # one addition
    return tl.sum(halves, 1)


@triton.jit
def signed(negative, magnitude):
    return tl.where(negative, -magnitude, magnitude)
