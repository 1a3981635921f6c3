"""Staged operation: chunks are copied to host memory, transferred over the connections, and copied back, pipelined.

The order of operations below must not depend on the speed of a device, only on the order of begins and waits, because
the mesh uses this order to detect a rank that issues another collective. A chunk's copy is therefore awaited when the
chunk's turn comes, with up to TRAVELING chunks of an operation in flight.

An operation is created before it begins: its first chunks are copied by then, as far as there is memory, as are those
of other operations that are created before any begins. None of these copies waits for another operation's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.staging.device_copies import CopyEvent
from gossamer.comm.staging.pinned_arena import PinnedSlot
from gossamer.comm.staging.staging_area import Marks, Move, StagingArea

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
