"""Spans: the tensors of a selection, its blocks, and how much room its candidates get; copied to a device once.

Which entries may be among the k largest of a tensor is guessed from a sample, one entry of every `stride`, of which
k / stride are expected among the k. The bound is a sampled entry of a somewhat lower rank, and the room is for somewhat
more entries than are then expected: both margins are five standard deviations of such counts and a few more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.base.kernels.triton.block_table import BlockTable, block_table
from gossamer.base.kernels.triton.tiling import EVEN

BLOCK = 4096  # entries that a program looks at
WARPS = 16
SAMPLE = 16384  # entries of each tensor, at most


@dataclass(frozen=True)
class Spans:
    """Offsets of tensors in the input, in the room for candidates, and in the selection.

    Each tensor of numbers: (tensors,) int32.
    """

    blocks: BlockTable  # of the input
    rows: BlockTable  # the same ones, and behind them the blocks of the room for candidates
    starts: Tensor  # each tensor's first entry
    sizes: Tensor
    counts: Tensor  # how many entries of it travel
    firsts: Tensor  # which entry of all that travel is its first
    first_blocks: Tensor
    rooms: Tensor  # how many candidates it may have
    first_rooms: Tensor
    strides: Tensor  # of so many entries one is sampled
    ranks: Tensor  # which of those sampled, from the largest, is the bound; 0: none may travel
    even: int  # divides every start and length of the blocks
    total: int  # entries that travel
    room: int  # candidates of all tensors

    def __len__(self) -> int:
        return len(self.counts)


def spans(numel: int, sizes: Sequence[int], counts: Sequence[int], device: torch.device) -> Spans | None:
    """To take so many of the largest of each tensor. None where these tensors do not tile so many entries, or have
    fewer than are to be taken."""
    return _of_counts(numel, tuple(sizes), tuple(counts), device)


@lru_cache(maxsize=256)
def span(numel: int, room: int, device: torch.device) -> Spans:
    """Return spans to select entries above a bound, at most `room` of `numel`."""
    return _made((numel,), (0,), (1,), (0,), (min(room, numel),), device)


@lru_cache(maxsize=256)
def _of_counts(numel: int, sizes: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Spans | None:
    fit = len(sizes) == len(counts) and sum(sizes) == numel
    if not (fit and all(0 <= count <= size for size, count in zip(sizes, counts, strict=True))):
        return None
    strides = tuple(max(1, -(-size // SAMPLE)) for size in sizes)
    ranks = tuple(beyond(count / stride) for count, stride in zip(counts, strides, strict=True))
    rooms = tuple(min(size, beyond(rank) * stride) for size, rank, stride in zip(sizes, ranks, strides, strict=True))
    return _made(sizes, counts, strides, ranks, rooms, device)


def beyond(expected: float) -> int:
    """Return a bound that a count with this expectation exceeds once in millions of times; 0 for 0."""
    return math.ceil(expected + 5 * math.sqrt(expected) + 8) if expected else 0


def _made(
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    ranks: tuple[int, ...],
    rooms: tuple[int, ...],
    device: torch.device,
) -> Spans:
    before = _before(sizes), _before(counts), _before([-(-size // BLOCK) for size in sizes]), _before(rooms)
    columns = torch.tensor([sizes, counts, strides, ranks, rooms, *before], dtype=torch.int32).view(9, -1).to(device)
    of_size, taken, stride, rank, room, start, first, first_block, first_room = columns
    blocks, room_blocks = block_table(sizes, BLOCK, device), block_table(rooms, BLOCK, device)
    return Spans(
        blocks=blocks,
        rows=BlockTable(
            torch.cat([blocks.starts, room_blocks.starts]),
            torch.cat([blocks.lengths, room_blocks.lengths]),
            torch.cat([blocks.owners, room_blocks.owners]),
            BLOCK,
        ),
        starts=start,
        sizes=of_size,
        counts=taken,
        firsts=first,
        first_blocks=first_block,
        rooms=room,
        first_rooms=first_room,
        strides=stride,
        ranks=rank,
        even=EVEN if math.gcd(EVEN, *sizes) == EVEN else 1,
        total=sum(counts),
        room=sum(rooms),
    )


def _before(numbers: Sequence[int]) -> list[int]:
    """The sum of all numbers before each."""
    return list(accumulate(numbers, initial=0))[:-1]
