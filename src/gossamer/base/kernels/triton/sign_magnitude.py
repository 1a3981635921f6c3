"""Signs and one of two magnitudes on a GPU: the means of a block's small and of its large ones, and which is each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import sign_magnitude
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.rows import row_means
from gossamer.base.kernels.triton.wanted import signed

LARGE: tl.constexpr = tl.constexpr(sign_magnitude.LARGE)
MINUS: tl.constexpr = tl.constexpr(sign_magnitude.MINUS)


@triton.jit
def _coded(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    size = tl.abs(w)
    is_large = size > row_means(size, length)[:, None]
    count = tl.sum(is_large.to(tl.int32), 1)
    small = row_means(tl.where(is_large, 0.0, size), length - count)
    large = row_means(tl.where(is_large, size, 0.0), count)
    return small, large, tl.where(is_large, LARGE, 0) + tl.where(w < 0, MINUS, 0)


@triton.jit
def _meant(code, small, large, most: tl.constexpr):
    return signed(code >= MINUS, tl.where(code % 2 == LARGE, large, small))


FORMAT = CodeFormat(_meant, torch.uint8, 2, width=2)


def sign_magnitude_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.sign_magnitude.sign_magnitude_encode."""
    found = encoded(FORMAT, _coded, x, sizes, block, residual)
    return found or sign_magnitude.sign_magnitude_encode(x, sizes, block, residual)


def sign_magnitude_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.sign_magnitude.sign_magnitude_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        sign_magnitude.sign_magnitude_decode(payloads, sizes, block, out, divisor)
