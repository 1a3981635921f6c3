"""Pinned arena: one piece of memory from which chunks take slots and to which they give them back; never more of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED_BYTES = 64  # so that what lies there may be viewed as wider numbers


@dataclass(frozen=True, eq=False)
class PinnedSlot:
    """Bytes of an arena, from `begin` on until before `end`; memory: (nbytes,) of uint8."""

    memory: Tensor
    begin: int = 0
    end: int = 0


class PinnedArena:
    """Memory of `capacity_bytes`, allocated when it is first needed. A slot takes the first gap that it fits."""

    def __init__(self, allocate: Callable[[int], Tensor], capacity_bytes: int) -> None:
        self._allocate, self._capacity_bytes = allocate, capacity_bytes
        self._memory: Tensor | None = None
        self._taken: list[PinnedSlot] = []  # by place

    def take(self, nbytes: int) -> PinnedSlot | None:
        """A slot that nothing else uses, with arbitrary contents; None while there is no gap for it."""
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
        """Memory of its own, for a chunk that cannot wait for others to give theirs back."""
        return PinnedSlot(self._allocate(nbytes))

    def give_back(self, slot: PinnedSlot) -> None:
        """Nothing uses it any more, and the next one may have it."""
        if slot in self._taken:
            self._taken.remove(slot)

    def _whole(self) -> Tensor:
        if self._memory is None:
            self._memory = self._allocate(self._capacity_bytes)
        return self._memory
