"""Spans: the tensors of a selection and its blocks, checked and copied to a device once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.kernels.triton.block_table import BlockTable, block_table

BLOCK = 8192  # entries that a program looks at
WARPS = 16


@dataclass(frozen=True)
class Spans:
    """Where tensors lie in what is selected from and in what is selected. Each tensor: (tensors,) int32."""

    table: BlockTable
    counts: Tensor  # how many entries of each tensor travel
    firsts: Tensor  # which entry of all that travel is the tensor's first
    blocks: Tensor  # which block is the tensor's first
    total: int  # entries that travel

    def __len__(self) -> int:
        return len(self.counts)


def spans(numel: int, sizes: Sequence[int], counts: Sequence[int], device: torch.device) -> Spans | None:
    """None where these tensors do not tile so many entries, or have fewer than are to be taken."""
    return _made(numel, tuple(sizes), tuple(counts), device)


@lru_cache(maxsize=256)
def _made(numel: int, sizes: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Spans | None:
    fit = len(sizes) == len(counts) and sum(sizes) == numel
    if not (fit and all(0 <= count <= size for size, count in zip(sizes, counts, strict=True))):
        return None
    columns = counts, _before(counts), _before([-(-size // BLOCK) for size in sizes])
    taken, firsts, blocks = torch.tensor(columns, dtype=torch.int32).view(3, -1).to(device)
    return Spans(block_table(sizes, BLOCK, device), taken, firsts, blocks, sum(counts))


def _before(numbers: Sequence[int]) -> list[int]:
    """The sum of all numbers before each."""
    return list(accumulate(numbers, initial=0))[:-1]
