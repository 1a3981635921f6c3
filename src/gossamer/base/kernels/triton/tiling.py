"""Tiling: how programs share the blocks of tensors that lie side by side, and where the bytes of their codes begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.base.kernels.triton.block_table import block_table
from gossamer.base.kernels.triton.launch import EXACT, TILE, serves, warps_for

EVEN = 8  # entries; where every tensor holds a multiple of them a thread reads several at once


@dataclass(frozen=True)
class Tiling:
    """Blocks, a few of which a program serves: (together, block) entries, together: a power of two."""

    starts: Tensor  # (blocks,) int32
    lengths: Tensor  # (blocks,) int32
    first_bytes: Tensor  # (blocks,) int64, of the codes of each block
    block: int
    together: int
    even: int  # divides every start and length

    @property
    def grid(self) -> tuple[int]:
        return (triton.cdiv(len(self.starts), self.together),)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The first arguments of every kernel over blocks."""
        return self.starts, self.lengths, self.first_bytes, len(self.starts)

    @property
    def shape(self) -> dict[str, Any]:
        """How every kernel over blocks is compiled."""
        warps = warps_for(self.block * self.together)
        return {"block": self.block, "together": self.together, "even": self.even, "num_warps": warps, **EXACT}


def tiling_of(sizes: Sequence[int], block: int, bits: int, device: torch.device) -> Tiling:
    """Blocks of tensors of these sizes, with codes of so many bits an entry, of which every tensor begins a byte. Made
    once for a layout."""
    return _made(tuple(sizes), block, bits, device)


@lru_cache(maxsize=256)
def _made(sizes: tuple[int, ...], block: int, bits: int, device: torch.device) -> Tiling:
    table = block_table(sizes, block, device)
    even = EVEN if gcd(EVEN, *sizes) == EVEN else 1
    first_bytes = first_bytes_of(sizes, block, bits, 8).to(device)
    return Tiling(table.starts, table.lengths, first_bytes, block, max(1, TILE // block), even)


def first_bytes_of(sizes: Sequence[int], block: int, of_bytes: int, entries: int) -> Tensor:
    """Where each block's codes begin: (blocks,) int64, where so many bytes hold so many entries, which divide a
    block."""
    found, first = [torch.empty(0, dtype=torch.int64)], 0
    for size in sizes:
        found.append(first + torch.arange(0, size, block) * of_bytes // entries)
        first += -(-size * of_bytes // entries)
    return torch.cat(found)


def tileable(sizes: Sequence[int], x: Tensor, *others: Tensor) -> bool:
    """Whether kernels may run over x, and others in float32, which the sizes tile."""
    whole = min(sizes, default=0) >= 0 and (sum(sizes),)
    fits = all(tensor.shape == whole and tensor.device == x.device for tensor in (x, *others))
    return fits and serves(x) and serves(*others, types=(torch.float32,))


def halved(block: int) -> bool:
    """Whether a program holds a block: a power of two, in which every byte of codes belongs to one block."""
    return 8 <= block <= LARGEST_BLOCK and block & (block - 1) == 0
