"""Arithmetic within kernels: sums and noise whose bits are those of plain torch on any device."""

from __future__ import annotations

import triton
import triton.language as tl

LOW = 0xFFFFFFFF
APART: tl.constexpr = tl.constexpr(16)  # as in reference/counter_rng


def halves_of(key: int) -> tuple[int, int]:
    """The key of counter-based noise as two arguments of a kernel: its low and its high 32 bits."""
    return key & LOW, key >> 32


@triton.jit
def sum_of_halves(x, length: tl.constexpr):
    """The sum of x: (length,), a power of two: halves are added until one number is left. Triton's own sum leaves the
    order open. length: up to 2^14."""
    halves = x
    for _ in tl.static_range(14):
        if halves.shape[0] > 1:
            halves = tl.sum(tl.reshape(halves, (2, halves.shape[0] // 2)), 0)  # of two numbers: one addition
    return tl.sum(halves, 0)


@triton.jit
def mixed(x):
    """lowbias32 by Wellons 2018 of x: uint32, as in reference/counter_rng."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hashed(place, low, high):
    """32 random bits for each place: uint32. low, high: the halves of the key, uint32."""
    return mixed((place.to(tl.uint32) * 0x9E3779B9 + low.to(tl.uint32)) ^ high.to(tl.uint32))


@triton.jit
def paired(place, low, high, bits: tl.constexpr):
    """int32 below 2^bits for each place, as in reference/counter_rng: of every 32 places two share one hash."""
    group, within = place // (2 * APART), place % (2 * APART)
    bits_of_both = hashed(group * APART + within % APART, low, high)
    turned = (bits_of_both << 16) | (bits_of_both >> 16)
    return (tl.where(within < APART, bits_of_both, turned) >> (32 - bits)).to(tl.int32)
