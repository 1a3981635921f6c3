"""Staged operation: chunks go to this machine's memory, over its connections, and back, some of them at a time.

When something is begun below depends on nothing but the order in which operations are begun and waited for, never on
how fast a device is: connections tell by that order who issues another collective. So a chunk's copy is waited for when
its turn comes, and TRAVELING of each operation are under way.

An operation is made before it begins: its first chunks are copied by then, as far as there is memory, and so are those
of others that are made before any of them begins. None of these copies waits for another operation's.
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

TRAVELING = 8  # chunks of an operation, at most: 16 MiB, which fill 1 Gbit/s over 100 ms

Wait = Callable[[], Any]


@dataclass(frozen=True)
class Chunk:
    """A part of an operation. nbytes: of its slot; begin: begins it below, given the slot's memory, (nbytes,) of uint8;
    what it returns waits until all of it is there."""

    nbytes: int
    inward: Sequence[Move]
    begin: Callable[[Tensor], Wait]
    outward: Sequence[Move]


class StagedOp:
    """An operation whose first chunks are being copied to this machine's memory."""

    def __init__(self, area: StagingArea, chunks: Sequence[Chunk], device: torch.device) -> None:
        """device: one that the memory in between is pinned for."""
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
        """Begin below; what it returns waits until the current stream will find the whole answer where it belongs,
        though the device may still copy, and gives what `answer` does."""
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
        """Begin another chunk below, and have the one after it copied meanwhile, where there is memory for it."""
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
        """Begin to copy another chunk, if there is one, and memory for it without waiting; whether that is so."""
        vacant = self._area.vacant(self._left[0].nbytes, self._device) if self._left else None
        if vacant is not None:
            self._copy(vacant)
        return vacant is not None

    def _copy(self, slot: PinnedSlot) -> None:
        chunk = self._left.popleft()
        events = self._area.bring(chunk.inward, slot, self._ready)
        # Its inputs are not held here: until they are read, `keep` has the allocator leave them alone
        self._copied.append((slot, events, Chunk(chunk.nbytes, (), chunk.begin, chunk.outward)))
