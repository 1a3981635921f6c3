"""Sign codes on a GPU: the mean magnitude of a block, and whether each entry is negative."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import onebit
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.decoding import decoded
from gossamer.base.kernels.triton.encoding import encoded
from gossamer.base.kernels.triton.rows import row_means
from gossamer.base.kernels.triton.wanted import signed


@triton.jit
def _coded(w, length, place, given, low, high, bits: tl.constexpr, most: tl.constexpr):
    scale = row_means(tl.abs(w), length)
    return scale, scale, (w < 0).to(tl.int32)


@triton.jit
def _meant(code, scale, _, most: tl.constexpr):
    return signed(code != 0, scale)


FORMAT = CodeFormat(_meant, torch.uint8, 1)


def onebit_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.onebit.onebit_encode."""
    return encoded(FORMAT, _coded, x, sizes, block, residual) or onebit.onebit_encode(x, sizes, block, residual)


def onebit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.onebit.onebit_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        onebit.onebit_decode(payloads, sizes, block, out, divisor)
