"""Block table: where the blocks of tensors that lie side by side begin, and how many entries each has, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTable:
    """A program of a kernel handles a block: row b has its range of entries. No block extends into another tensor."""

    starts: Tensor  # (blocks,) int32, within the whole buffer
    lengths: Tensor  # (blocks,) int32, of 1 to `block` entries
    owners: Tensor  # (blocks,) int32, the number of the tensor
    block: int

    def __len__(self) -> int:
        return len(self.starts)


def block_table(sizes: Sequence[int], block: int, device: torch.device) -> BlockTable:
    """The blocks of tensors of these sizes. A layout is the same at every step: its table is made, and copied to the
    device, once."""
    return _made(tuple(sizes), block, device)


@lru_cache(maxsize=256)
def _made(sizes: tuple[int, ...], block: int, device: torch.device) -> BlockTable:
    starts, lengths, owners = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], []
    first = 0
    for size in sizes:
        within = torch.arange(0, size, block)
        starts.append(within + first)
        lengths.append((size - within).clamp(max=block))
        owners.append(len(within))
        first += size
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(owners, dtype=torch.int64))
    columns = torch.stack([torch.cat(starts), torch.cat(lengths), numbers]).to(device, torch.int32)
    return BlockTable(columns[0], columns[1], columns[2], block)
