"""Signs and powers of two on a GPU: one pass to encode, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import float4
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.packing import store_codes
from gossamer.kernels.triton.rows import located, owe, signed, wanted
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, room, tiling_of

MINUS: tl.constexpr = tl.constexpr(float4.MINUS)


@triton.jit
def _at_least(ratio: tl.constexpr, scale):
    """The smallest float32 that is not below ratio times scale, which float64 holds exactly: comparing with it is as
    exact as a quotient, and takes no float64 for every entry."""
    exact = scale.to(tl.float64) * ratio
    near = exact.to(tl.float32)
    return tl.where(near.to(tl.float64) < exact, near.to(tl.int32, bitcast=True) + 1, near.to(tl.int32, bitcast=True))


@triton.jit
def _magnitude(exponent):
    """2^(exponent - 7), 0 where the exponent is."""
    return tl.where(exponent == 0, 0, (exponent + 120) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _float4_meant(code, scale, _, most: tl.constexpr):
    return signed(code >= MINUS, _magnitude(code & (MINUS - 1)) * scale)


@triton.jit
def _float4_encode(
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
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, length, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here, status)
    scale = tl.max(tl.abs(w), 1)
    tl.store(scales + row, scale, mask=live)
    magnitude = tl.abs(w).to(tl.int32, bitcast=True)  # ordered as the numbers are
    exponent = (magnitude >= _at_least(2.0**-7, scale)[:, None]).to(tl.int32)
    for place_of_two in tl.static_range(1, 7):
        exponent += (magnitude >= _at_least(1.5 * 2.0 ** (place_of_two - 7), scale)[:, None]).to(tl.int32)
    exponent = tl.where(scale[:, None] == 0, 0, exponent)
    code = tl.where((w < 0) & (exponent > 0), exponent + MINUS, exponent)
    store_codes(code, codes, tl.load(first_bytes + row, mask=live, other=0), length, live, 4, block, together)
    owe(after, w, _float4_meant(code, scale[:, None], 0, 0), place, here)


FORMAT = Format(_float4_meant, torch.uint8, 4, most=15, hole=float4.MINUS)


def float4_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.float4.float4_encode."""
    if not encodable(x, sizes, block, residual):
        return float4.float4_encode(x, sizes, block, residual)
    tiling, status = tiling_of(sizes, block, 4, x.device), fresh(x.device)
    scales, codes = room(x, sizes, block, 4)
    _float4_encode[tiling.grid](raw(x), *both(residual), scales, codes, status, *tiling.places, **tiling.shape)
    expect_finite(status)
    return scales, codes


def float4_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.float4.float4_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        float4.float4_decode(payloads, sizes, block, out, divisor)
