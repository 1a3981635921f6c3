"""Mask parts: a buffer in as many equal parts as there are ranks; each rank marks the same number of indices in its
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import expect_tensors, sent_by
from gossamer.algorithms.compressors.topk import share
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import coded_bytes, decode_places, encode_places, largest
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError

WORD = 8  # flags, of a byte each, that are tested together


@dataclass(frozen=True)
class MaskParts:
    """Parts of a buffer of `numel` entries, at least one for each of `world` ranks; each rank marks `each` of its own
    part.
    """

    numel: int
    world: int
    each: int

    @classmethod
    def of(cls, numel: int, world: int, density: float) -> MaskParts:
        return _mask_parts(numel, world, density)

    @property
    def total(self) -> int:
        """Number of indices in a mask."""
        return self.world * self.each

    @property
    def longest(self) -> int:
        return -(-self.numel // self.world)

    @property
    def coded_bytes(self) -> int:
        """Bytes of the encoded indices of one rank."""
        return coded_bytes(self.each, self.longest)

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return the bounds of a rank's part.

        Parts rotate every step, so entries that are large on one rank only are found.
        """
        part = (rank + step) % self.world
        return part * self.numel // self.world, (part + 1) * self.numel // self.world

    def chosen(self, x: Tensor, at: AggregationContext) -> Tensor:
        """Encode the indices of the largest entries of x: (n,) in this rank's part, relative to its start."""
        begin, end = self.bounds(at.rank, at.step)
        places, _ = largest(x[begin:end], [end - begin], [self.each])
        return encode_places(places, self.longest)

    def mark(self, received: Sequence[Payload], mask: Tensor, at: AggregationContext) -> None:
        """Overwrite the mask: (n,) bool with the indices that ranks sent. Raises MalformedError, before it writes."""
        found = [self._told(payload, rank, at) for rank, payload in enumerate(received)]
        mask.zero_().index_fill_(0, torch.cat(found), True)

    def _told(self, payload: Payload, rank: int, at: AggregationContext) -> Tensor:
        """Return the indices that a rank sent, in the whole buffer: (each,) int64."""
        begin, end = self.bounds(rank, at.step)
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            places = decode_places(payload[0], self.each, self.longest).long()
            if not places.is_meta and int(places[-1]) >= end - begin:
                raise MalformedError(f"an index is beyond the {end - begin} entries of this rank's part")
        return places + begin

    def fitted(self, mask: Tensor) -> Tensor:
        """Return `total` indices of a mask: (n,) bool, ascending: (total,) int64.

        A mask with more, as after a change of the number of ranks, is thinned out evenly; one with fewer, as at first,
        is filled with evenly spaced indices. All ranks compute the same from the same mask.
        """
        if mask.is_meta:
            return mask.new_empty(self.total, dtype=torch.int64)
        places = marked(mask)
        if len(places) == self.total:
            return places
        if len(places) > self.total:
            return places[_spread(self.total, len(places), mask)]
        free = mask.logical_not().nonzero().view(-1)
        added = free[_spread(self.total - len(places), len(free), mask)]
        return torch.sort(torch.cat([places, added])).values


@lru_cache(maxsize=256)
def _mask_parts(numel: int, world: int, density: float) -> MaskParts:
    return MaskParts(numel, world, min(numel // world, -(-share(density, numel) // world)))


def _spread(count: int, n: int, like: Tensor) -> Tensor:
    """Return `count` numbers below n, evenly spaced: (count,) int64."""
    return torch.arange(count, device=like.device) * n // max(count, 1)


def marked(mask: Tensor) -> Tensor:
    """Return the indices at which a mask: (n,) bool is set, ascending: (k,) int64.

    Tests eight at a time; few are set.
    """
    whole = len(mask) // WORD * WORD
    if not whole or mask.storage_offset() % WORD:
        return mask.nonzero().view(-1)
    words = mask[:whole].view(torch.int64)
    used = words.nonzero().view(-1)
    within = words.index_select(0, used).view(torch.bool).nonzero().view(-1)
    found = used.index_select(0, within >> 3).mul_(WORD).add_(within.bitwise_and_(WORD - 1))
    rest = mask[whole:].nonzero().view(-1) + whole
    return torch.cat([found, rest])
