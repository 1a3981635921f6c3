"""Packing: codes of few bits to bytes and back, within a kernel. Bits of entries follow each other, lowest first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_codes(
    codes, packed, first_byte, length, live, bits: tl.constexpr, block: tl.constexpr, together: tl.constexpr
):
    """Write codes: (together, block) int32 of 1, 2, 4 or 8 bits, zero beyond each length."""
    per_byte: tl.constexpr = 8 // bits
    columns: tl.constexpr = block // per_byte
    shifts = (tl.arange(0, per_byte) * bits)[None, None, :]
    found = tl.sum(tl.reshape(codes, (together, columns, per_byte)) << shifts, 2)
    column = tl.arange(0, columns)[None, :]
    here = live[:, None] & (column * per_byte < length[:, None])
    tl.store(packed + first_byte[:, None] + column, found.to(tl.uint8), mask=here)


@triton.jit
def store_stream(
    codes,
    packed,
    first_byte,
    length,
    bits: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
):
    """Write codes: (together, block) int32 of 2 to 16 bits, zero beyond each length: eight entries to `bits` bytes.
    columns: the power of two from `bits`."""
    eights: tl.constexpr = block // 8
    eight = tl.reshape(codes, (together, eights, 8)).to(tl.int64)
    at = (tl.arange(0, 8) * bits)[None, None, :]
    low = tl.sum(tl.where(at < 64, eight << tl.minimum(at, 63), 0), 2)[:, :, None]
    column = tl.arange(0, columns)[None, None, :]
    found = low >> (8 * tl.minimum(column, 7))
    if bits > 8:  # what lies beyond 64 bits, or reaches there
        above = tl.where(at >= 64, eight << tl.maximum(at - 64, 0), eight >> tl.minimum(64 - tl.minimum(at, 64), 63))
        high = tl.sum(tl.where(at + bits > 64, above, 0), 2)[:, :, None]
        found = tl.where(column < 8, found, high >> (8 * tl.maximum(column - 8, 0)))
    byte = tl.arange(0, eights)[None, :, None] * bits + column
    here = (column < bits) & (byte * 8 < (length * bits)[:, None, None])
    tl.store(packed + first_byte[:, None, None] + byte, (found & 255).to(tl.uint8), mask=here)


@triton.jit
def load_codes(packed, first_byte, within, here, bits: tl.constexpr):
    """The codes of entries `within` a block whose bytes begin at first_byte: int32; zero where none is. int8 keep
    their sign."""
    if bits == 8:
        found = tl.load(packed + first_byte + within, mask=here, other=0).to(tl.int32)
    else:
        at = within * bits
        byte, shift = packed + first_byte + at // 8, at % 8
        found = tl.load(byte, mask=here, other=0).to(tl.int32)
        if 8 % bits != 0:  # a code may reach into the next bytes
            for more in tl.static_range(1, (bits + 14) // 8):
                needed = here & (shift + bits > 8 * more)
                found |= tl.load(byte + more, mask=needed, other=0).to(tl.int32) << (8 * more)
        found = (found >> shift) & ((1 << bits) - 1)
    return found


@triton.jit
def rest_of_byte(packed, first_byte, length, live, bits: tl.constexpr):
    """What stands behind a block's last code in its last byte: (together,) int32. No encoder writes anything there."""
    used = length * bits
    left = live & (used % 8 != 0)
    return tl.load(packed + first_byte + used // 8, mask=left, other=0).to(tl.int32) >> (used % 8)
