"""Staging area: an arena, the copies of every device, and what has to arrive before a slot serves another chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gossamer.comm.staging.device_copies import CopyEvent, DeviceCopies, Way, copies_for
from gossamer.comm.staging.pinned_arena import PinnedArena, PinnedSlot

CAPACITY_BYTES = 2**26  # pinned at most, but for chunks that could not be smaller

Move = tuple[Tensor, int]  # contiguous (n,) of uint8 where the tensor lies, and where they lie in a slot
Marks = dict[torch.device, CopyEvent]


class StagingArea:
    """Of one group; calls come from one thread at a time. copies_of: the copies of a device."""

    def __init__(
        self,
        copies_of: Callable[[torch.device], DeviceCopies] = copies_for,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self._copies_of, self._capacity_bytes = copies_of, capacity_bytes
        self._arena: PinnedArena | None = None
        self._arriving: deque[tuple[Sequence[CopyEvent], PinnedSlot]] = deque()

    def marks(self, devices: Iterable[torch.device]) -> Marks:
        """The moments from which on what these devices' current streams were given up to now can be read."""
        return {device: self._copies_of(device).mark() for device in devices}

    def slot(self, nbytes: int, device: torch.device) -> PinnedSlot:
        """Memory for a chunk. Where there is none it waits for slots that copies still read, oldest first."""
        while (found := self.vacant(nbytes, device)) is None:
            if not self._arriving:
                return self._arena_for(device).beyond(nbytes)  # all is on its way to others, who may wait for this
            for event in self._arriving[0][0]:
                event.await_here()
        return found

    def vacant(self, nbytes: int, device: torch.device) -> PinnedSlot | None:
        """Memory for a chunk, where some is left without waiting."""
        arena = self._arena_for(device)
        while self._arriving and all(event.is_past() for event in self._arriving[0][0]):
            arena.give_back(self._arriving.popleft()[1])
        return arena.take(nbytes)

    def bring(self, moves: Sequence[Move], slot: PinnedSlot, ready: Marks) -> Sequence[CopyEvent]:
        """Begin to copy from devices into a slot; the moments when that is done."""
        return list(self._copied(Way.TO_HOST, moves, slot, ready).values())

    def give(self, moves: Sequence[Move], slot: PinnedSlot, ready: Marks) -> Marks:
        """Begin to copy from a slot to devices, after which it serves another chunk; the moments when that is done."""
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
        """One for all devices: pinned memory is every device's."""
        if self._arena is None:
            self._arena = PinnedArena(self._copies_of(device).pinned, self._capacity_bytes)
        return self._arena
