"""Pinned arena: a fixed amount of memory from which chunks take slots, and to which they return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED_BYTES = 64  # so that the bytes may be viewed as wider types


@dataclass(frozen=True, eq=False)
class PinnedSlot:
    """The bytes [begin, end) of an arena. memory: uint8 of shape (nbytes,)."""

    memory: Tensor
    begin: int = 0
    end: int = 0


class PinnedArena:
    """Memory of `capacity_bytes`, allocated on first use. A slot is placed in the first gap that fits."""

    def __init__(self, allocate: Callable[[int], Tensor], capacity_bytes: int) -> None:
        self._allocate, self._capacity_bytes = allocate, capacity_bytes
        self._memory: Tensor | None = None
        self._taken: list[PinnedSlot] = []  # by offset

    def take(self, nbytes: int) -> PinnedSlot | None:
        """Take an uninitialized slot; None if no gap is large enough."""
        if not nbytes:
            return PinnedSlot(torch.empty(0, dtype=torch.uint8, device="cpu"))
        size, begin = -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES, 0
        for place, other in enumerate([*self._taken, None]):
            end = self._capacity_bytes if other is None else other.begin
            if size <= end - begin:
                slot = PinnedSlot(self._whole()[begin : begin + nbytes], begin, begin + size)
                self._taken.insert(place, slot)
                return slot
            begin = begin if other is None else other.end
        return None

    def beyond(self, nbytes: int) -> PinnedSlot:
        """Allocate separate memory, for a chunk that cannot wait until other slots are returned."""
        return PinnedSlot(self._allocate(nbytes))

    def give_back(self, slot: PinnedSlot) -> None:
        """Return a slot that is no longer used."""
        if slot in self._taken:
            self._taken.remove(slot)

    def _whole(self) -> Tensor:
        if self._memory is None:
            self._memory = self._allocate(self._capacity_bytes)
        return self._memory
