"""8-bit codes on a GPU: one pass to encode, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import quantize
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.reference.segments import blocks
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.noise import key_halves, stochastic
from gossamer.kernels.triton.rows import located, owe, wanted
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, tiling_of

ROUND: tl.constexpr = tl.constexpr(1.5 * 2**23)  # added and taken away again, it rounds to the nearest, even integer


@triton.jit(do_not_specialize=["low", "high"])
def _int8_encode(
    x,
    before,
    after,
    scales,
    codes,
    status,
    starts,
    lengths,
    first_bytes,
    blocks,
    low,
    high,
    noisy: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, _, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here, status)
    scale = tl.div_rn(tl.max(tl.abs(w), 1), 127.0)
    tl.store(scales + row, scale, mask=live)
    scale = scale[:, None]
    if noisy:
        code = stochastic(w, scale, place, low, high, 127, 24)
    else:
        code = (tl.div_rn(w, tl.where(scale == 0, 1.0, scale)) + ROUND - ROUND).to(tl.int32)
        code = tl.where(scale == 0, 0, tl.minimum(tl.maximum(code, -127), 127))
    tl.store(codes + place, code.to(tl.int8), mask=here)
    owe(after, w, code.to(tl.float32) * scale, place, here)


@triton.jit
def _int8_meant(code, scale, _, most: tl.constexpr):
    return code.to(tl.float32) * scale


FORMAT = Format(_int8_meant, torch.int8, 8)


def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.quantize.int8_encode."""
    if not encodable(x, sizes, block, residual):
        return quantize.int8_encode(x, sizes, block, key, residual)
    tiling, status = tiling_of(sizes, block, 8, x.device), fresh(x.device)
    scales = torch.empty(blocks(sizes, block), device=x.device)
    codes = torch.empty(len(x), dtype=torch.int8, device=x.device)
    buffers = raw(x), *both(residual), scales, codes, status
    _int8_encode[tiling.grid](*buffers, *tiling.places, *key_halves(key or 0), noisy=key is not None, **tiling.shape)
    expect_finite(status)
    return scales, codes


def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.quantize.int8_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        quantize.int8_decode(payloads, sizes, block, out, divisor)
