"""8-bit codes on a GPU: a 127th of a block's largest magnitude, and how many of it each entry is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import quantize
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.noise import stochastic

MOST: tl.constexpr = tl.constexpr(127)
ROUND: tl.constexpr = tl.constexpr(1.5 * 2**23)  # added and taken away again, it rounds to the nearest, even integer


@triton.jit
def _scale(w):
    return tl.div_rn(tl.max(tl.abs(w), 1), 1.0 * MOST)


@triton.jit
def _nearest(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    scale = _scale(w)
    unit = scale[:, None]
    code = (tl.div_rn(w, tl.where(unit == 0, 1.0, unit)) + ROUND - ROUND).to(tl.int32)
    return scale, scale, tl.where(unit == 0, 0, tl.minimum(tl.maximum(code, -MOST), MOST))


@triton.jit
def _drawn(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    scale = _scale(w)
    return scale, scale, stochastic(w, scale[:, None], place, low, high, MOST, bits)


@triton.jit
def _meant(code, scale, _, most: tl.constexpr):
    return code.to(tl.float32) * scale


FORMAT = CodeFormat(_meant, torch.int8, 8)


def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.quantize.int8_encode."""
    coded = _nearest if key is None else _drawn
    found = encoded(FORMAT, coded, x, sizes, block, residual, word=key or 0)
    return found or quantize.int8_encode(x, sizes, block, key, residual)


def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.quantize.int8_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        quantize.int8_decode(payloads, sizes, block, out, divisor)
