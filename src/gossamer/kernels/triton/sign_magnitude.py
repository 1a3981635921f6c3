"""Signs and one of two magnitudes on a GPU: one pass to encode, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import sign_magnitude
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.reference.segments import blocks
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.packing import store_codes
from gossamer.kernels.triton.rows import expect_sendable, located, owe, row_sums, signed, wanted
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, room, tiling_of

LARGE: tl.constexpr = tl.constexpr(sign_magnitude.LARGE)
MINUS: tl.constexpr = tl.constexpr(sign_magnitude.MINUS)


@triton.jit
def _sign_magnitude_meant(code, small, large, most: tl.constexpr):
    return signed(code >= MINUS, tl.where(code % 2 == LARGE, large, small))


@triton.jit
def _mean(x, count, together: tl.constexpr, block: tl.constexpr):
    return tl.div_rn(row_sums(x, together, block), tl.maximum(count, 1).to(tl.float32))


@triton.jit
def _sign_magnitude_encode(
    x,
    before,
    after,
    means,
    codes,
    status,
    starts,
    lengths,
    first_bytes,
    blocks,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, length, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here, status)
    magnitude = tl.abs(w)
    large = magnitude > _mean(magnitude, length, together, block)[:, None]
    count = tl.sum(large.to(tl.int32), 1)
    first = _mean(tl.where(large, 0.0, magnitude), length - count, together, block)
    second = _mean(tl.where(large, magnitude, 0.0), count, together, block)
    expect_sendable(first[:, None], status)
    expect_sendable(second[:, None], status)
    tl.store(means + 2 * row, first, mask=live)
    tl.store(means + 2 * row + 1, second, mask=live)
    code = tl.where(large, LARGE, 0) + tl.where(w < 0, MINUS, 0)
    store_codes(code, codes, tl.load(first_bytes + row, mask=live, other=0), length, live, 2, block, together)
    owe(after, w, _sign_magnitude_meant(code, first[:, None], second[:, None], 0), place, here)


FORMAT = Format(_sign_magnitude_meant, torch.uint8, 2, width=2)


def sign_magnitude_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.sign_magnitude.sign_magnitude_encode."""
    if not encodable(x, sizes, block, residual):
        return sign_magnitude.sign_magnitude_encode(x, sizes, block, residual)
    tiling, status = tiling_of(sizes, block, 2, x.device), fresh(x.device)
    means = torch.empty(2 * blocks(sizes, block), device=x.device)
    _, codes = room(x, sizes, block, 2)
    buffers = raw(x), *both(residual), means, codes, status
    _sign_magnitude_encode[tiling.grid](*buffers, *tiling.places, **tiling.shape)
    expect_finite(status)
    return means, codes


def sign_magnitude_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.sign_magnitude.sign_magnitude_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        sign_magnitude.sign_magnitude_decode(payloads, sizes, block, out, divisor)
