"""Noise: within a kernel, quantization that is right on average, as reference/counter_rng.stochastic does it."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.arithmetic import halves_of, paired

SMALL: tl.constexpr = tl.constexpr(2.0**-100)
LIFT: tl.constexpr = tl.constexpr(2.0**100)


def key_halves(key: int) -> tuple[int, int]:
    """The key as two int32, whatever it is: it changes with every step, and a kernel shall not be compiled anew."""
    low, high = halves_of(key)
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


@triton.jit
def stochastic(w, unit, place, low, high, most: tl.constexpr, bits: tl.constexpr):
    """floor(w / unit + u) between -most and most, 0 where the unit is: int32. bits: noise_bits(most)."""
    whole: tl.constexpr = 1 << bits
    lift = tl.where(unit < SMALL, LIFT, 1.0)
    nonzero = tl.where(unit == 0, 1.0, unit * lift)
    per_unit = tl.where(unit == 0, 0.0, tl.div_rn(tl.full(unit.shape, whole, tl.float32), nonzero))
    fixed = w * lift * per_unit
    fixed = tl.minimum(tl.maximum(fixed, -1.0 * most * whole), 1.0 * most * whole).to(tl.int32)
    return (fixed + paired(place, low, high, bits)) >> bits


def noise_bits(most: int) -> int:
    """Digits behind the point, as in reference/counter_rng.stochastic."""
    return min(24, 31 - most.bit_length())
