"""Two-bit codes on a GPU: one pass to encode, thresholds measured in it, and one to add any number of payloads up."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import twobit
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.reference.segments import blocks
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.packing import store_codes
from gossamer.kernels.triton.rows import expect_sendable, located, owe, row_sums, wanted
from gossamer.kernels.triton.stacking import fit
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, room, tiling_of

MINUS: tl.constexpr = tl.constexpr(twobit.MINUS)
PLUS: tl.constexpr = tl.constexpr(twobit.PLUS)


@triton.jit
def _twobit_meant(code, limit, _, most: tl.constexpr):
    return tl.where(code == PLUS, limit, tl.where(code == MINUS, -limit, 0.0))


@triton.jit
def _measured(w, part_bits, together: tl.constexpr, block: tl.constexpr):
    """part sum of w^2 / sum of |w| of each row, in float64; the part comes as its bits, since numbers given to a kernel
    are float32."""
    wide = w.to(tl.float64)
    first, second = row_sums(tl.abs(wide), together, block), row_sums(wide * wide, together, block)
    part = part_bits.to(tl.int64).to(tl.float64, bitcast=True)
    return tl.where(first == 0, 0.0, part * second / tl.where(first == 0, 1.0, first)).to(tl.float32)


@triton.jit(do_not_specialize=["part_bits"])
def _twobit_encode(
    x,
    before,
    after,
    thresholds,
    codes,
    status,
    starts,
    lengths,
    first_bytes,
    blocks,
    part_bits,
    measured: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, length, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here, status)
    if measured:
        limit = _measured(w, part_bits, together, block)
        expect_sendable(limit[:, None], status)
        tl.store(thresholds + row, limit, mask=live)
    else:
        limit = tl.load(thresholds + row, mask=live, other=0.0)
    limit = limit[:, None]
    code = tl.where(here, tl.where(w >= limit, PLUS, tl.where(w <= -limit, MINUS, 0)), 0)
    store_codes(code, codes, tl.load(first_bytes + row, mask=live, other=0), length, live, 2, block, together)
    owe(after, w, _twobit_meant(code, limit, 0, 0), place, here)


FORMAT = Format(_twobit_meant, torch.uint8, 2, most=3, hole=1)


def twobit_encode(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None = None
) -> Tensor:
    """As reference.twobit.twobit_encode."""
    given = fit([thresholds], torch.float32, blocks(sizes, block), x)
    if not (given and encodable(x, sizes, block, residual)):
        return twobit.twobit_encode(x, sizes, block, thresholds, residual)
    return _encoded(x, sizes, block, thresholds, None, residual)


def twobit_measured_encode(
    x: Tensor, sizes: Sequence[int], block: int, part: float, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.twobit.twobit_measured_encode."""
    if not (part > 0 and encodable(x, sizes, block, residual)):
        return twobit.twobit_measured_encode(x, sizes, block, part, residual)
    thresholds = torch.empty(blocks(sizes, block), device=x.device)
    return thresholds, _encoded(x, sizes, block, thresholds, part, residual)


def _encoded(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, part: float | None, residual: Residual | None
) -> Tensor:
    tiling, status = tiling_of(sizes, block, 2, x.device), fresh(x.device)
    _, codes = room(x, sizes, block, 2)
    buffers = raw(x), *both(residual), thresholds, codes, status
    (part_bits,) = struct.unpack("<q", struct.pack("<d", part or 0.0))
    _twobit_encode[tiling.grid](*buffers, *tiling.places, part_bits, measured=part is not None, **tiling.shape)
    expect_finite(status)
    return codes


def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """As reference.twobit.twobit_decode."""
    if not decoded(FORMAT, payloads, sizes, block, out, divisor):
        twobit.twobit_decode(payloads, sizes, block, out, divisor)
