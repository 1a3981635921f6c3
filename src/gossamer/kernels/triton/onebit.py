"""Sign codes on a GPU: one pass to encode, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import onebit
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.packing import store_codes
from gossamer.kernels.triton.rows import expect_sendable, located, owe, row_sums, signed, wanted
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, room, tiling_of


@triton.jit
def _onebit_encode(
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
    scale = tl.div_rn(row_sums(tl.abs(w), together, block), tl.maximum(length, 1).to(tl.float32))
    expect_sendable(scale[:, None], status)
    tl.store(scales + row, scale, mask=live)
    negative = w < 0
    first_byte = tl.load(first_bytes + row, mask=live, other=0)
    store_codes(negative.to(tl.int32), codes, first_byte, length, live, 1, block, together)
    owe(after, w, signed(negative, scale[:, None]), place, here)


@triton.jit
def _onebit_meant(code, scale, _, most: tl.constexpr):
    return signed(code != 0, scale)


FORMAT = Format(_onebit_meant, torch.uint8, 1)


def onebit_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.onebit.onebit_encode."""
    if not encodable(x, sizes, block, residual):
        return onebit.onebit_encode(x, sizes, block, residual)
    tiling, status = tiling_of(sizes, block, 1, x.device), fresh(x.device)
    scales, codes = room(x, sizes, block, 1)
    _onebit_encode[tiling.grid](raw(x), *both(residual), scales, codes, status, *tiling.places, **tiling.shape)
    expect_finite(status)
    return scales, codes


def onebit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.onebit.onebit_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        onebit.onebit_decode(payloads, sizes, block, out, divisor)
