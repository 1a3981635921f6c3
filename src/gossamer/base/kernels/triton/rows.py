"""Rows: within a kernel, the blocks of a program as a tile of (together, block) entries, their sums and means."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.base.kernels.reference.segments import LARGEST_BLOCK

MOST_HALVINGS: tl.constexpr = tl.constexpr(LARGEST_BLOCK.bit_length() - 1)


@triton.jit
def located(starts, lengths, blocks, block: tl.constexpr, together: tl.constexpr, even: tl.constexpr):
    """(row, live, length): (together,), the number of each block, whether there is one, and its entries; then
    (place, here): (together, block), the offset of each entry, and whether it exists."""
    row = tl.program_id(0) * together + tl.arange(0, together)
    live = row < blocks
    start = tl.multiple_of(tl.load(starts + row, mask=live, other=0), even)
    length = tl.multiple_of(tl.load(lengths + row, mask=live, other=0), even)
    within = tl.arange(0, block)[None, :]
    return row, live, length, start[:, None] + within, within < length[:, None]


@triton.jit
def first_byte_of(first_bytes, row, live, bits: tl.constexpr, even: tl.constexpr):
    """(together,): where the codes of each block, of so many bits, begin."""
    aligned: tl.constexpr = bits & -bits if even % 8 == 0 else 1  # eight entries take `bits` bytes
    return tl.multiple_of(tl.load(first_bytes + row, mask=live, other=0), aligned)


@triton.jit
def row_sums(x):
    """(rows,): the sum of each row of x, of a power of two of entries: halves are added until one number is left.
    Triton's own sum leaves the order open."""
    halves = x
    for _ in tl.static_range(MOST_HALVINGS):
        if halves.shape[1] > 1:
            pairs = tl.reshape(halves, (halves.shape[0], 2, halves.shape[1] // 2))
            halves = tl.sum(pairs, 1)  # of two numbers: one addition
    return tl.sum(halves, 1)


@triton.jit
def row_means(x, count):
    """Return the mean of `count` numbers of each row, of which the others are zero: (rows,); zero for empty rows."""
    return tl.div_rn(row_sums(x), tl.maximum(count, 1).to(tl.float32))
