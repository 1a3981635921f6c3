"""Staging area: an arena, the copies of every device, and the copies that must complete before a slot is reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gossamer.comm.staging.device_copies import CopyEvent, DeviceCopies, Way, copies_for
from gossamer.comm.staging.pinned_arena import PinnedArena, PinnedSlot

CAPACITY_BYTES = 2**26  # limit of the pinned memory, except for chunks that cannot wait

Move = tuple[Tensor, int]  # (contiguous uint8 tensor of shape (n,) on a device, offset in a slot)
Marks = dict[torch.device, CopyEvent]


class StagingArea:
    """The memory of one group, used by one thread at a time. copies_of: returns the copies of a device."""

    def __init__(
        self,
        copies_of: Callable[[torch.device], DeviceCopies] = copies_for,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self._copies_of, self._capacity_bytes = copies_of, capacity_bytes
        self._arena: PinnedArena | None = None
        self._arriving: deque[tuple[Sequence[CopyEvent], PinnedSlot]] = deque()

    def marks(self, devices: Iterable[torch.device]) -> Marks:
        """Record an event on the current stream of each device, after which the inputs can be read."""
        return {device: self._copies_of(device).mark() for device in devices}

    def slot(self, nbytes: int, device: torch.device) -> PinnedSlot:
        """Return memory for a chunk. If necessary, wait for copies from slots to complete, oldest first."""
        while (found := self.vacant(nbytes, device)) is None:
            if not self._arriving:
                return self._arena_for(device).beyond(nbytes)  # all slots are in transfer; a peer may wait for this one
            for event in self._arriving[0][0]:
                event.await_here()
        return found

    def vacant(self, nbytes: int, device: torch.device) -> PinnedSlot | None:
        """Return memory for a chunk, or None if none is available without waiting."""
        arena = self._arena_for(device)
        while self._arriving and all(event.is_past() for event in self._arriving[0][0]):
            arena.give_back(self._arriving.popleft()[1])
        return arena.take(nbytes)

    def bring(self, moves: Sequence[Move], slot: PinnedSlot, ready: Marks) -> Sequence[CopyEvent]:
        """Begin copies from devices to a slot; return their completion events."""
        return list(self._copied(Way.TO_HOST, moves, slot, ready).values())

    def give(self, moves: Sequence[Move], slot: PinnedSlot, ready: Marks) -> Marks:
        """Begin copies from a slot to devices, after which the slot is reused; return their completion events."""
        done = self._copied(Way.TO_DEVICE, moves, slot, ready)
        self._arriving.append((list(done.values()), slot))
        return done

    def _copied(self, way: Way, moves: Sequence[Move], slot: PinnedSlot, ready: Marks) -> Marks:
        devices = dict.fromkeys(tensor.device for tensor, _ in moves)
        for device in devices:
            ready[device].precede(way)
        for tensor, at in moves:
            copies, here = self._copies_of(tensor.device), slot.memory[at : at + tensor.numel()]
            pair = (here, tensor) if way is Way.TO_HOST else (tensor, here)
            copies.copy(way, *pair)
            copies.keep(way, tensor)
        return {device: self._copies_of(device).record(way) for device in devices}

    def _arena_for(self, device: torch.device) -> PinnedArena:
        """Return the arena, one for all devices, because every device can use pinned memory."""
        if self._arena is None:
            self._arena = PinnedArena(self._copies_of(device).pinned, self._capacity_bytes)
        return self._arena
