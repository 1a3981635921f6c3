"""Levels below a norm on a GPU: one pass to encode, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference import levels as levelled
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.triton.decoding import Format, decoded
from gossamer.kernels.triton.noise import key_halves, noise_bits, stochastic
from gossamer.kernels.triton.packing import store_stream
from gossamer.kernels.triton.rows import expect_sendable, located, owe, row_sums, wanted
from gossamer.kernels.triton.status import expect_finite, fresh
from gossamer.kernels.triton.tiling import both, encodable, raw, room, tiling_of

MOST_LEVELS = 2**15 - 1  # whose codes have two bytes


@triton.jit
def _levels_meant(code, norm, _, most: tl.constexpr):
    return (code - most // 2).to(tl.float32) * tl.div_rn(norm, most // 2 * 1.0)


@triton.jit(do_not_specialize=["low", "high"])
def _levels_encode(
    x,
    before,
    after,
    norms,
    codes,
    status,
    starts,
    lengths,
    first_bytes,
    blocks,
    low,
    high,
    levels: tl.constexpr,
    bits: tl.constexpr,
    columns: tl.constexpr,
    digits: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, length, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here, status)
    squares = row_sums(w * w, together, block)
    expect_sendable(squares[:, None], status)
    norm = tl.sqrt_rn(squares)
    tl.store(norms + row, norm, mask=live)
    unit = tl.div_rn(norm, levels * 1.0)[:, None]
    whole = stochastic(w, unit, place, low, high, levels, digits)
    code, first_byte = tl.where(here, whole + levels, 0), tl.load(first_bytes + row, mask=live, other=0)
    store_stream(code, codes, first_byte, length, bits, columns, block, together)
    owe(after, w, whole.to(tl.float32) * unit, place, here)


def levels_encode(
    x: Tensor, sizes: Sequence[int], block: int, levels: int, key: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.levels.levels_encode."""
    if not (levels <= MOST_LEVELS and encodable(x, sizes, block, residual)):
        return levelled.levels_encode(x, sizes, block, levels, key, residual)
    bits = levelled.level_bits(levels)
    tiling, status = tiling_of(sizes, block, bits, x.device), fresh(x.device)
    norms, codes = room(x, sizes, block, bits)
    named = {"bits": bits, "columns": triton.next_power_of_2(bits), "digits": noise_bits(levels), **tiling.shape}
    buffers = raw(x), *both(residual), norms, codes, status
    _levels_encode[tiling.grid](*buffers, *tiling.places, *key_halves(key), levels=levels, **named)
    expect_finite(status)
    return norms, codes


def levels_decode(
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    levels: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    """As reference.levels.levels_decode."""
    form = Format(_levels_meant, torch.uint8, levelled.level_bits(levels), most=2 * levels)
    if not (levels <= MOST_LEVELS and decoded(form, payloads, sizes, block, out, divisor)):
        levelled.levels_decode(payloads, sizes, block, levels, out, divisor)
