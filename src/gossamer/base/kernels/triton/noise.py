"""Noise: within a kernel, the random bits of reference/counter_rng, and quantization that is right on average."""

from __future__ import annotations

import triton
import triton.language as tl

APART: tl.constexpr = tl.constexpr(16)  # as in reference/counter_rng
SMALL: tl.constexpr = tl.constexpr(2.0**-100)
LIFT: tl.constexpr = tl.constexpr(2.0**100)


def halves_of(word: int) -> tuple[int, int]:
    """Return 64 bits, such as a key, as two int32, low and high, which may change without recompiling a kernel."""
    low, high = word & 0xFFFFFFFF, word >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


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
    """32 random bits for each place: uint32. low, high: the halves of the key."""
    return mixed((place.to(tl.uint32) * 0x9E3779B9 + low.to(tl.uint32)) ^ high.to(tl.uint32))


@triton.jit
def paired(place, low, high, digits: tl.constexpr):
    """int32 below 2^digits for each place, as in reference/counter_rng: of every 32 places two share one hash."""
    group, within = place // (2 * APART), place % (2 * APART)
    bits_of_both = hashed(group * APART + within % APART, low, high)
    turned = (bits_of_both << 16) | (bits_of_both >> 16)
    return (tl.where(within < APART, bits_of_both, turned) >> (32 - digits)).to(tl.int32)


@triton.jit
def stochastic(w, unit, place, low, high, most: tl.constexpr, bits: tl.constexpr):
    """floor(w / unit + u) between -most and most, which take so many bits, 0 where the unit is: int32."""
    digits: tl.constexpr = 24 if bits <= 8 else 32 - bits  # behind the point
    whole: tl.constexpr = 1 << digits
    lift = tl.where(unit < SMALL, LIFT, 1.0)
    nonzero = tl.where(unit == 0, 1.0, unit * lift)
    per_unit = tl.where(unit == 0, 0.0, tl.div_rn(1.0 * whole, nonzero))
    fixed = w * lift * per_unit
    fixed = tl.minimum(tl.maximum(fixed, -1.0 * most * whole), 1.0 * most * whole).to(tl.int32)
    return (fixed + paired(place, low, high, digits)) >> digits
