"""Buffer pool: large buffers of every step keep their memory, since fresh pages cost as much as filling them.

Unused memory follows the need: all blocks together, in use and idle, are at most SLACK times the bytes that were in use
at once at a recent peak. A peak is recent in its window and the next one, so pages are filled again at most once per
window. Filling KEPT bytes takes about 1 % of a window.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE = 2**20  # bytes; the allocator reuses smaller buffers itself
KEPT = 2**28  # maximum bytes of idle blocks
SLACK = 1.25  # idle blocks whose sizes do not fit the next requests need some
WINDOW_SECONDS = 10.0
ALIGNMENT = 64

Block = npt.NDArray[np.uint8]


@dataclass
class Blocks:
    """Accounts of all blocks: those in use by their bytes, and the idle ones, which may be used again.

    Args:
        clock: seconds.
    """

    clock: Callable[[], float] = time.monotonic
    in_use: int = 0  # bytes
    idle: list[Block] = field(default_factory=list)  # the least recently used first
    returned: deque[Block] = field(default_factory=deque)  # finalizers append, at any time and in any thread
    _peak: int = 0  # bytes in use at once, in this window
    _last_peak: int = 0  # in the window before
    _began: float = 0.0  # this window
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def idle_bytes(self) -> int:
        return sum(block.nbytes for block in self.idle)

    @property
    def peak(self) -> int:
        """Recent peak of the bytes in use at once."""
        return max(self._peak, self._last_peak)

    def take(self, nbytes: int) -> Block:
        """Return the smallest idle block that is large enough and no more than twice so, or a new one."""
        with self._lock:
            self._collect()
            fits = [place for place, block in enumerate(self.idle) if nbytes <= block.nbytes - ALIGNMENT <= 2 * nbytes]
            found = self.idle.pop(min(fits, key=lambda place: self.idle[place].nbytes)) if fits else None
            self.in_use += nbytes + ALIGNMENT if found is None else found.nbytes
            self._note_peak()
            self._trim()
        return np.empty(nbytes + ALIGNMENT, dtype=np.uint8) if found is None else found

    def release(self) -> None:
        """Free all idle blocks."""
        with self._lock:
            self._collect()
            self.idle.clear()
            self._peak = self._last_peak = self.in_use

    def _collect(self) -> None:
        while self.returned:
            block = self.returned.popleft()
            self.in_use -= block.nbytes
            self.idle.append(block)

    def _note_peak(self) -> None:
        now = self.clock()
        if now - self._began > WINDOW_SECONDS:
            self._began, self._last_peak, self._peak = now, self._peak, 0
        self._peak = max(self._peak, self.in_use)

    def _trim(self) -> None:
        allowed, idle = min(KEPT, SLACK * self.peak - self.in_use), self.idle_bytes
        while idle > allowed:
            idle -= self.idle.pop(0).nbytes


blocks = Blocks()


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,) on the CPU, with arbitrary contents. Its memory is used again once no tensor sees it any more."""
    nbytes = numel * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(numel, dtype=dtype, device="cpu")
    block = blocks.take(nbytes)
    start = -block.ctypes.data % ALIGNMENT
    lease = block.data[start : start + nbytes]
    weakref.finalize(lease, blocks.returned.append, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype)


def scratch_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(n,) of x's type or another, with arbitrary contents, for x: (n,). Other devices keep memory themselves."""
    return scratch_for(x.numel(), x.dtype if dtype is None else dtype, x.device)


def scratch_for(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) with arbitrary contents, on any device."""
    return empty(numel, dtype) if device.type == "cpu" else torch.empty(numel, dtype=dtype, device=device)
