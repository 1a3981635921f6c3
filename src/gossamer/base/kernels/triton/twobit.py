"""Two-bit codes on a GPU: a threshold of a block, given or measured, and which entries are beyond it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import twobit
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.rows import row_sums

MINUS: tl.constexpr = tl.constexpr(twobit.MINUS)
PLUS: tl.constexpr = tl.constexpr(twobit.PLUS)


@triton.jit
def _beyond(w, threshold):
    return tl.where(w >= threshold, PLUS, tl.where(w <= -threshold, MINUS, 0))


@triton.jit
def _given(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    return given, given, _beyond(w, given[:, None])


@triton.jit
def _measured(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    """Thresholds are part sum of w^2 / sum of |w|, in float64; the part comes as its bits, since numbers given to a
    kernel are float32."""
    wide = w.to(tl.float64)
    first, second = row_sums(tl.abs(wide)), row_sums(wide * wide)
    part = (high.to(tl.int64) << 32 | low.to(tl.uint32).to(tl.int64)).to(tl.float64, bitcast=True)
    threshold = tl.where(first == 0, 0.0, part * second / tl.where(first == 0, 1.0, first)).to(tl.float32)
    return threshold, threshold, _beyond(w, threshold[:, None])


@triton.jit
def _meant(code, threshold, _, most: tl.constexpr):
    return tl.where(code == PLUS, threshold, tl.where(code == MINUS, -threshold, 0.0))


FORMAT = CodeFormat(_meant, torch.uint8, 2, most=3, hole=1)


def twobit_encode(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None = None
) -> Tensor:
    """As reference.twobit.twobit_encode."""
    found = encoded(FORMAT, _given, x, sizes, block, residual, given=thresholds)
    return found[1] if found else twobit.twobit_encode(x, sizes, block, thresholds, residual)


def twobit_measured_encode(
    x: Tensor, sizes: Sequence[int], block: int, part: float, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.twobit.twobit_measured_encode."""
    (word,) = struct.unpack("<Q", struct.pack("<d", part))
    found = encoded(FORMAT, _measured, x, sizes, block, residual, word=word) if part > 0 else None
    return found or twobit.twobit_measured_encode(x, sizes, block, part, residual)


def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.twobit.twobit_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        twobit.twobit_decode(payloads, sizes, block, out, divisor)
