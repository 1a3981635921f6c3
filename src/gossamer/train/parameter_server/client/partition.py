"""Partition: assignment of tensor rows to servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.base.layout import FlatTensors, Layout, Slot

WHOLE_BELOW = 8  # tensors smaller than a server's share divided by this are never cut


class ShardSlice(NamedTuple):
    """The rows first_row ... end_row - 1 of a tensor, along its first dimension; a scalar is one row."""

    name: str
    first_row: int
    end_row: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of the whole tensor, as a view: (rows, ...)."""
        return (tensor if tensor.dim() else tensor.view(1))[self.first_row : self.end_row]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (self.end_row - self.first_row, *whole[1:])


def split(
    layout: Layout, shards: int, itemsizes: Mapping[str, int] | None = None
) -> tuple[tuple[ShardSlice, ...], ...]:
    """Partition by servers: consecutive rows, in the layout's order, with bytes as equal as whole rows allow.

    Tensors below an eighth of a server's share stay whole. With too few rows, fewer servers than `shards` get some.

    Args:
        itemsizes: bytes per element by name, if dtypes differ.
    """
    slots = [slot for slot in layout if slot.numel]
    row_bytes = [prod(slot.shape[1:]) * (itemsizes or {}).get(slot.name, 1) for slot in slots]
    total = sum(_rows(slot) * size for slot, size in zip(slots, row_bytes, strict=True))
    cuts = [_cut(slots, row_bytes, total, number, shards) for number in range(shards + 1)]
    spans = (tuple(_between(slots, begin, end)) for begin, end in pairwise(cuts))
    return tuple(span for span in spans if span)


def servers_for(layout: Layout, part_bytes: int, itemsizes: Mapping[str, int]) -> int | None:
    """The smallest number of servers with at most `part_bytes` on each; None if one row is larger."""
    rows = {slot.name: prod(slot.shape[1:]) * itemsizes[slot.name] for slot in layout if slot.numel}
    if max(rows.values(), default=0) > part_bytes:
        return None

    def fits(shards: int) -> bool:
        divided = split(layout, shards, itemsizes)
        return all(
            sum(rows[part.name] * (part.end_row - part.first_row) for part in held) <= part_bytes for held in divided
        )

    total = sum(slot.numel * itemsizes[slot.name] for slot in layout)
    return next(shards for shards in count(max(1, ceil(total / part_bytes))) if fits(shards))


def _rows(slot: Slot) -> int:
    return slot.shape[0] if slot.shape else 1


def _cut(slots: Sequence[Slot], row_bytes: Sequence[int], total: int, number: int, shards: int) -> tuple[int, int]:
    """The (tensor index, row) at which server `number` begins: the allowed cut nearest to an exact division."""
    start = 0
    for index, (slot, size) in enumerate(zip(slots, row_bytes, strict=True)):
        rows = _rows(slot)
        beyond = number * total - start * shards  # in bytes / shards, to avoid rounding
        if beyond < rows * size * shards:
            step = rows if rows * size * shards * WHOLE_BELOW < total else 1  # rows that stay together
            row = step * ((2 * beyond + size * step * shards) // (2 * size * step * shards))
            return (index, row) if row < rows else (index + 1, 0)
        start += rows * size
    return len(slots), 0


def _between(slots: Sequence[Slot], begin: tuple[int, int], end: tuple[int, int]) -> Iterator[ShardSlice]:
    for index in range(begin[0], min(end[0] + 1, len(slots))):
        first = begin[1] if index == begin[0] else 0
        last = end[1] if index == end[0] else _rows(slots[index])
        if first < last:
            yield ShardSlice(slots[index].name, first, last)


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor | None], parts: Iterable[ShardSlice], into: FlatTensors) -> None:
    """Copy the rows `parts` of the tensors into `into`, which has one tensor per part; None is copied as zero."""
    for part in parts:
        tensor = tensors[part.name]
        if tensor is None:
            into[part.name].zero_()
        else:
            into[part.name].copy_(part.of(tensor))


@torch.no_grad()
def scatter(values: FlatTensors, parts: Iterable[ShardSlice], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the rows `parts` of the whole tensors."""
    for part in parts:
        part.of(tensors[part.name].detach()).copy_(values[part.name])
