"""Buffer pool: large buffers of every step keep their memory, since fresh pages cost as much as filling them."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE = 2**20  # bytes; the allocator reuses smaller buffers itself
KEPT = 2**28  # bytes of unused buffers; the least recently used are freed first
ALIGNMENT = 64

Block = npt.NDArray[np.uint8]

_returned: deque[Block] = deque()  # a finalizer runs anywhere, also while the lock is held: it only appends
_idle: list[Block] = []
_lock = threading.Lock()


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,) on the CPU, with arbitrary contents. Its memory is used again once no tensor sees it any more."""
    nbytes = numel * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(numel, dtype=dtype, device="cpu")
    block = _taken(nbytes)
    start = -block.ctypes.data % ALIGNMENT
    lease = block.data[start : start + nbytes]
    weakref.finalize(lease, _returned.append, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype)


def scratch_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(n,) of x's type or another, with arbitrary contents, for x: (n,). Other devices keep memory themselves."""
    return scratch_for(x.numel(), x.dtype if dtype is None else dtype, x.device)


def scratch_for(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) with arbitrary contents, on any device."""
    return empty(numel, dtype) if device.type == "cpu" else torch.empty(numel, dtype=dtype, device=device)


def _taken(nbytes: int) -> Block:
    """The smallest idle block that is large enough and no more than twice so, or a new one."""
    with _lock:
        while _returned:
            _idle.append(_returned.popleft())
        fits = [place for place, block in enumerate(_idle) if nbytes <= block.nbytes - ALIGNMENT <= 2 * nbytes]
        found = _idle.pop(min(fits, key=lambda place: _idle[place].nbytes)) if fits else None
        while sum(each.nbytes for each in _idle) > KEPT:
            _idle.pop(0)
    return np.empty(nbytes + ALIGNMENT, dtype=np.uint8) if found is None else found
