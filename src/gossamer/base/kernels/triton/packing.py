"""Packing: codes of few bits to bytes and back, within a kernel. Bits of entries follow each other, lowest first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_codes(codes, packed, first_byte, length, bits: tl.constexpr):
    """Write codes: (rows, block) int32 of 1 to 16 bits, zero beyond each length, to the bytes from first_byte on."""
    if 8 % bits == 0:
        _store_in_bytes(codes, packed, first_byte[:, None], length[:, None], bits)
    else:
        _store_over_bytes(codes, packed, first_byte[:, None], length[:, None], bits)


@triton.jit
def _store_in_bytes(codes, packed, first_byte, length, bits: tl.constexpr):
    """Codes of which a byte holds several whole ones."""
    per_byte: tl.constexpr = 8 // bits
    columns: tl.constexpr = codes.shape[1] // per_byte
    at = (tl.arange(0, per_byte) * bits)[None, None, :]
    byte = tl.sum(tl.reshape(codes, (codes.shape[0], columns, per_byte)) << at, 2)
    column = tl.arange(0, columns)[None, :]
    tl.store(packed + first_byte + column, byte.to(packed.dtype.element_ty), mask=column * per_byte < length)


@triton.jit
def _store_over_bytes(codes, packed, first_byte, length, bits: tl.constexpr):
    """Codes that reach over bytes: eight of them fill `bits` bytes, and four fit into 64 bits."""
    eights: tl.constexpr = codes.shape[1] // 8
    at = (tl.arange(0, 4) * bits)[None, None, None, :]
    low, high = tl.split(tl.sum(tl.reshape(codes, (codes.shape[0], eights, 2, 4)).to(tl.int64) << at, 3))
    for byte in tl.static_range(bits):
        column = tl.arange(0, eights)[None, :] * bits + byte
        found = _eight_bits(low, high, 8 * byte, 4 * bits)
        tl.store(packed + first_byte + column, found.to(tl.uint8), mask=column * 8 < length * bits)


@triton.jit
def _eight_bits(low, high, at: tl.constexpr, width: tl.constexpr):
    """The bits from `at` on of `width` low ones and as many high ones."""
    if at >= width:
        found = high >> (at - width)
    elif at + 8 <= width:
        found = low >> at
    else:
        found = (low >> at) | (high << (width - at))
    return found & 255


@triton.jit
def load_codes(packed, first_byte, within, here, bits: tl.constexpr):
    """Return the codes of entries `within` a block with bytes from first_byte: int32; zero elsewhere. int8 keep their
    sign.
    """
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
    """Return the bits behind a block's last code in its last byte: (together,) int32. Encoders write zeros there."""
    used = length * bits
    left = live & (used % 8 != 0)
    return tl.load(packed + first_byte + used // 8, mask=left, other=0).to(tl.int32) >> (used % 8)
