"""Encoding: block scales and entry codes, checked and written with the residual, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.reference.segments import blocks
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.noise import halves_of
from gossamer.base.kernels.triton.packing import store_codes
from gossamer.base.kernels.triton.rows import first_byte_of, located
from gossamer.base.kernels.triton.stacking import fit
from gossamer.base.kernels.triton.status import expect_finite, expect_sendable, fresh
from gossamer.base.kernels.triton.tiling import halved, tileable, tiling_of
from gossamer.base.kernels.triton.wanted import raw, store_residual, tensors_of, wanted


@triton.jit(do_not_specialize=["low", "high"])
def _encode(
    x, before, after, given, scales, codes, status, starts, lengths, first_bytes, blocks, low, high,
    coded: tl.constexpr, meant: tl.constexpr, bits: tl.constexpr, width: tl.constexpr, most: tl.constexpr,
    block: tl.constexpr, together: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    row, live, length, place, here = located(starts, lengths, blocks, block, together, even)
    w = wanted(x, before, place, here)
    expect_sendable(w, status)
    number = None if given is None else tl.load(given + row, mask=live, other=0.0)
    first, second, code = coded(w, length, place, number, low, high, bits, most)
    if given is None:
        expect_sendable(first, status)
        tl.store(scales + width * row, first, mask=live)
        if width == 2:
            expect_sendable(second, status)
            tl.store(scales + width * row + 1, second, mask=live)
    code = tl.where(here, code, 0)
    store_codes(code, codes, first_byte_of(first_bytes, row, live, bits, even), length, bits)
    store_residual(after, w - meant(code, first[:, None], second[:, None], most), place, here)


def encoded(
    form: CodeFormat,
    coded: Any,
    x: Tensor,
    sizes: Sequence[int],
    block: int,
    residual: Residual | None,
    *,
    word: int = 0,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(numbers of blocks, codes). None, and nothing is written, where plain torch has to do it. Raises NotFinite.

    coded: within a kernel, (w, length, place, given, low, high, bits, most) -> (first, second number of each block,
    codes), the numbers twice where a block has one; codes beyond the length may be anything. given: (blocks,) float32
    where the caller has the numbers. low, high: the halves of `word`, a key for instance.
    """
    known = given is None or fit([given], torch.float32, blocks(sizes, block), x)
    if not (known and encodable(x, sizes, block, residual)):
        return None
    tiling, status = tiling_of(sizes, block, form.bits, x.device), fresh(x.device)
    made, codes = form.room(sizes, block, x.device)
    scales = made if given is None else given
    buffers = raw(x), *tensors_of(residual), given, scales, codes, status
    named = {"coded": coded, "meant": form.meant, **form.named, **tiling.shape}
    _encode[tiling.grid](*buffers, *tiling.places, *halves_of(word), **named)
    expect_finite(status)
    return scales, codes


def encodable(x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None) -> bool:
    """Whether blocks with sums by halves fit into programs, and the buffers fit."""
    return halved(block) and tileable(sizes, x, *both(residual))
