"""Row blocks: tensors cut into rows of equal length, and a sketch of every row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gossamer.base.kernels.reference.counter_rng import uniform

SMALL = 2**14  # entries; for smaller tensors, a function call takes longer than a copy


@dataclass(frozen=True)
class RowBlocks:
    """Tensors of these sizes, each cut into rows of `row` entries in memory order; the last row may be shorter."""

    sizes: tuple[int, ...]
    row: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of each tensor."""
        return tuple(-(-size // self.row) for size in self.sizes)

    @cached_property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def _even(self) -> bool:
        return all(size % self.row == 0 for size in self.sizes)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int, int], ...]:
        """(begin, end, first row) of tensors whose rows are contiguous, merged to reduce the number of calls."""
        found: list[tuple[int, int, int]] = []
        begin = row = 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            if found and (begin - found[-1][0]) % self.row == 0:
                found[-1] = (found[-1][0], begin + size, found[-1][2])
            else:
                found.append((begin, begin + size, row))
            begin, row = begin + size, row + count
        return tuple(found)

    @cached_property
    def _many_small(self) -> bool:
        return len(self._spans) > 1 and sum(self.sizes) < SMALL * len(self._spans)

    def _filled_up(self, x: Tensor) -> Tensor:
        """Return a copy of x: (n,) with each tensor padded with zeros to whole rows: (total row,)."""
        filled = x.new_zeros(self.total * self.row)
        gaps = [(size, count * self.row - size) for size, count in zip(self.sizes, self.counts, strict=True)]
        torch._foreach_copy_(list(filled.split([size for gap in gaps for size in gap])[::2]), x.split(list(self.sizes)))
        return filled

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of the entries of some rows, ascending in the whole buffer: (k',) int64, k' <= len(rows)
        row.
        """
        columns = torch.arange(self.row, device=rows.device)
        if self._even or rows.is_meta:
            return (rows.long()[:, None] * self.row + columns).view(-1)
        rows = rows.long()
        size, count = torch.tensor([self.sizes, self.counts], device=rows.device).unbind()
        tensor = torch.searchsorted(count.cumsum(0), rows, right=True)
        start = (size.cumsum(0) - size)[tensor] + (rows - (count.cumsum(0) - count)[tensor]) * self.row
        every: Tensor = start[:, None] + columns
        return every[every < size.cumsum(0)[tensor][:, None]]

    def sketch(self, x: Tensor, signs: Tensor) -> Tensor:
        """Return signs . piece for each piece of len(signs) entries of every row: (total, pieces), zero beyond a
        tensor's end.

        One pass over x: (n,) at memory bandwidth, or three passes for many small tensors. signs: (row / pieces,).
        """
        if self._many_small:
            return row_blocks((self.total * self.row,), self.row).sketch(self._filled_up(x), signs)
        piece = len(signs)
        pieces = self.row // piece
        found = x.new_zeros(self.total * pieces)
        for begin, end, first in self._spans:
            whole, rest = divmod(end - begin, piece)
            middle, into = end - rest, first * pieces
            if whole:
                torch.mv(x[begin:middle].view(whole, piece), signs, out=found[into : into + whole])
            if rest:
                found[into + whole] = torch.dot(x[middle:end], signs[:rest])
        return found.view(self.total, pieces)


@lru_cache(maxsize=256)
def row_blocks(sizes: tuple[int, ...], row: int) -> RowBlocks:
    """Cached: the sizes are the same at every step."""
    return RowBlocks(sizes, row)


def signs(key: int, count: int, like: Tensor) -> Tensor:
    """Return (count,) of -1 and 1 in like's dtype, with equal probability, from a 63-bit key."""
    return (uniform(key, count, like.device) >= 0.5).to(like.dtype).mul_(2).sub_(1)


def squared_norms(sketch: Tensor) -> Tensor:
    """Return values proportional to the rows' squared norms, without overflow: (rows, pieces) -> (rows,) float32."""
    found = sketch.float()
    if found.is_meta or not found.numel():
        return found.new_empty(len(found))
    peak = found.abs().amax()
    return found.div_(peak.clamp(min=torch.finfo(found.dtype).tiny)).square_().sum(1)
