"""Signs and powers of two on a GPU: the largest magnitude of a block, and how far below it each entry is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import float4
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.wanted import magnitude, signed

MINUS: tl.constexpr = tl.constexpr(float4.MINUS)


@triton.jit
def _at_least(ratio: tl.constexpr, scale):
    """The magnitude of the smallest float32 that is not below ratio times scale, which float64 holds exactly: comparing
    with it is as exact as a quotient, and takes no float64 for every entry."""
    exact = scale.to(tl.float64) * ratio
    near = exact.to(tl.float32)
    return tl.where(near.to(tl.float64) < exact, magnitude(near) + 1, magnitude(near))


@triton.jit
def _coded(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    scale = tl.max(tl.abs(w), 1)
    exponent = (magnitude(w) >= _at_least(2.0**-7, scale)[:, None]).to(tl.int32)
    for place_of_two in tl.static_range(1, 7):
        exponent += (magnitude(w) >= _at_least(1.5 * 2.0 ** (place_of_two - 7), scale)[:, None]).to(tl.int32)
    exponent = tl.where(scale[:, None] == 0, 0, exponent)
    return scale, scale, tl.where((w < 0) & (exponent > 0), exponent + MINUS, exponent)


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 7), 0 where the exponent is."""
    return tl.where(exponent == 0, 0, (exponent + 120) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _meant(code, scale, _, most: tl.constexpr):
    return signed(code >= MINUS, _power_of_two(code & (MINUS - 1)) * scale)


FORMAT = CodeFormat(_meant, torch.uint8, 4, most=15, hole=float4.MINUS)


def float4_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.float4.float4_encode."""
    return encoded(FORMAT, _coded, x, sizes, block, residual) or float4.float4_encode(x, sizes, block, residual)


def float4_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.float4.float4_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        float4.float4_decode(payloads, sizes, block, out, divisor)
