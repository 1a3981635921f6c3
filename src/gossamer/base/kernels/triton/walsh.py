"""Walsh-Hadamard transform on a GPU: a program holds whole blocks, and no level of them is written to memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import hadamard as truth
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.base.kernels.triton.launch import EXACT, serves, tiles, warps_for
from gossamer.base.kernels.triton.status import expect_sendable, found, fresh

ENTRIES = 2048  # of several short blocks, which a program serves


@triton.jit
def sums_and_differences(x, rows: tl.constexpr, length: tl.constexpr, levels: tl.constexpr):
    """H x of every row: (rows, length). At every level the lowest bit of an entry's place is taken from it and put
    before the highest, so that each level is the same step, and after all of them every entry is back at its place."""
    for _ in tl.static_range(levels):
        first, second = tl.split(tl.reshape(x, (rows, length // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (rows, length))
    return x


@triton.jit
def _transform(
    x, starts, blocks, signs, scale, out, status,
    inverse: tl.constexpr, rows: tl.constexpr, length: tl.constexpr, levels: tl.constexpr,
):  # fmt: skip
    row, within = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, length)[None, :]
    place = tl.load(starts + row, mask=row < blocks, other=0)[:, None] + within
    inside = (row < blocks)[:, None] & (within < length)
    sign, number = tl.load(signs + within), tl.load(x + place, mask=inside, other=0.0)
    if inverse:
        number = sums_and_differences(number * scale, rows, length, levels) * sign
    else:
        number = sums_and_differences(number * sign * scale, rows, length, levels)
    expect_sendable(number, status)
    tl.store(out + place, number, mask=inside)


def hadamard(x: Tensor, sizes: Sequence[int], block: int, signs: Tensor, out: Tensor, *, inverse: bool = False) -> bool:
    """As reference.hadamard.hadamard."""
    if not _served(x, sizes, block, signs, out):
        return truth.hadamard(x, sizes, block, signs, out, inverse=inverse)
    status = fresh(x.device)
    for length, starts in _starts(tuple(sizes), block, x.device):
        rows = max(1, ENTRIES // length)
        _transform[tiles(len(starts), rows)](
            x, starts, len(starts), signs, 1 / sqrt(length), out, status,
            inverse=inverse, rows=rows, length=length, levels=length.bit_length() - 1,
            num_warps=warps_for(rows * length), **EXACT,
        )  # fmt: skip
    return not found(status)


def _served(x: Tensor, sizes: Sequence[int], block: int, signs: Tensor, out: Tensor) -> bool:
    power = 1 <= block <= LARGEST_BLOCK and block & (block - 1) == 0
    tiled = min(sizes, default=0) >= 0 and x.shape == out.shape == (sum(sizes),) and signs.shape == (block,)
    return power and tiled and serves(x, signs, out, types=(torch.float32,))


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...], block: int, device: torch.device) -> list[tuple[int, Tensor]]:
    """Every length of blocks, and where those of that length begin: (blocks,) int32."""
    found: dict[int, list[Tensor]] = {}
    for start, stop, length in truth.spans(sizes, block):
        found.setdefault(length, []).append(torch.arange(start, stop, length))
    return [(length, torch.cat(starts).to(device, torch.int32)) for length, starts in found.items()]
