"""Staging area: an arena, the copies of every device, and the copies that must complete before a slot is reused.

StagedOp is an operation in it: chunks are copied to host memory, transferred over the connections, and copied back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


# -- one operation: a chunk is transferred while the next one is copied ------------------------------------------------

# The order of operations below must not depend on the speed of a device, only on the order of begins and waits, because
# the mesh uses this order to detect a rank that issues another collective. A chunk's copy is therefore awaited when the
# chunk's turn comes, with up to TRAVELING chunks of an operation in flight.
#
# An operation is created before it begins: its first chunks are copied by then, as far as there is memory, as are those
# of other operations that are created before any begins. None of these copies waits for another operation's.

TRAVELING = 8  # most chunks of an operation in flight: 16 MiB, which fill 1 Gbit/s over 100 ms

Wait = Callable[[], Any]


@dataclass(frozen=True)
class Chunk:
    """A part of an operation.

    Attributes:
        nbytes: Size of its slot.
        inward: Moves from tensors into the slot.
        begin: Begins the transfer, given the slot's memory; the returned function waits until it is complete.
        outward: Moves from the slot to tensors.
    """

    nbytes: int
    inward: Sequence[Move]
    begin: Callable[[Tensor], Wait]
    outward: Sequence[Move]


class StagedOp:
    """An operation with its first chunks being copied to host memory."""

    def __init__(self, area: StagingArea, chunks: Sequence[Chunk], device: torch.device) -> None:
        """device: a device for which the host memory is pinned."""
        self._area, self._device = area, device
        self._left = deque(chunks)
        moves = [move for chunk in chunks for move in (*chunk.inward, *chunk.outward)]
        self._ready = area.marks(dict.fromkeys(tensor.device for tensor, _ in moves))
        self._copied: deque[tuple[PinnedSlot, Sequence[CopyEvent], Chunk]] = deque()
        self._traveling: deque[tuple[PinnedSlot, Wait, Chunk]] = deque()
        self._landed: Marks = {}
        while len(self._copied) < TRAVELING and self._copy_if_vacant():
            pass

    def begin(self, answer: Wait) -> Wait:
        """Begin the transfers. The returned function waits until the result can be used on the current stream, although
        the device may still be copying, and returns answer()."""
        for _ in range(min(TRAVELING, len(self._copied) + len(self._left))):
            self._begin_next()

        def wait() -> Any:
            self._arrive()
            return answer()

        return wait

    def _arrive(self) -> None:
        while self._traveling:
            slot, arrived, chunk = self._traveling.popleft()
            arrived()
            self._landed |= self._area.give(chunk.outward, slot, self._ready)
            self._begin_next()
        for event in self._landed.values():
            event.precede_current()

    def _begin_next(self) -> None:
        """Begin the transfer of another chunk, and copy the one after it meanwhile, if there is memory."""
        if not self._copied and self._left:
            self._copy(self._area.slot(self._left[0].nbytes, self._device))
        if not self._copied:
            return
        slot, events, chunk = self._copied.popleft()
        for event in events:
            event.await_here()
        self._traveling.append((slot, chunk.begin(slot.memory), chunk))
        if not self._copied:
            self._copy_if_vacant()

    def _copy_if_vacant(self) -> bool:
        """Begin to copy another chunk if there is one, and memory for it; return whether that is so."""
        vacant = self._area.vacant(self._left[0].nbytes, self._device) if self._left else None
        if vacant is not None:
            self._copy(vacant)
        return vacant is not None

    def _copy(self, slot: PinnedSlot) -> None:
        chunk = self._left.popleft()
        events = self._area.bring(chunk.inward, slot, self._ready)
        # The inputs are not referenced here: `keep` keeps the allocator from reusing them until they are read
        self._copied.append((slot, events, Chunk(chunk.nbytes, (), chunk.begin, chunk.outward)))
