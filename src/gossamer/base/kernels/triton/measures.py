"""Measures on a GPU: the largest magnitude of each tensor, and sums of squares of blocks, in one pass each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import ternary
from gossamer.base.kernels.reference.segments import blocks
from gossamer.base.kernels.triton.block_table import block_table
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.rows import located, row_sums
from gossamer.base.kernels.triton.status import expect_finite, expect_sendable, fresh
from gossamer.base.kernels.triton.tiling import halved, tileable, tiling_of
from gossamer.base.kernels.triton.wanted import magnitude, raw, wanted

SHARE = 4096  # entries of a tensor that one program measures


@triton.jit
def _magnitudes(x, largest, status, starts, lengths, owners, tile: tl.constexpr):
    program, within = tl.program_id(0), tl.arange(0, tile)
    here = within < tl.load(lengths + program)
    w = wanted(x, None, tl.load(starts + program) + within, here)
    expect_sendable(w, status)
    tl.atomic_max(largest + tl.load(owners + program), tl.max(magnitude(w), 0))


def magnitudes(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """As reference.ternary.magnitudes."""
    if not tileable(sizes, x):
        return ternary.magnitudes(x, sizes)
    table, status = block_table(sizes, SHARE, x.device), fresh(x.device)
    largest = torch.zeros(len(sizes), dtype=torch.int32, device=x.device)
    _magnitudes[(len(table),)](raw(x), largest, status, table.starts, table.lengths, table.owners, tile=SHARE, **EXACT)
    expect_finite(status)
    return largest.view(torch.float32)


@triton.jit
def _squares(
    x, sums, starts, lengths, first_bytes, blocks, block: tl.constexpr, together: tl.constexpr, even: tl.constexpr
):
    row, live, _, place, here = located(starts, lengths, blocks, block, together, even)
    wide = wanted(x, None, place, here).to(tl.float64)
    tl.store(sums + row, row_sums(wide * wide), mask=live)


def squares(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """As reference.ternary.squares."""
    if not (halved(block) and tileable(sizes, x)):
        return ternary.squares(x, sizes, block)
    tiling = tiling_of(sizes, block, 8, x.device)
    sums = torch.empty(blocks(sizes, block), dtype=torch.float64, device=x.device)
    _squares[tiling.grid](raw(x), sums, *tiling.places, **tiling.shape)
    return sums
