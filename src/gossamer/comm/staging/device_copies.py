"""Device copies: the operations that staging needs of a device. Copies run asynchronously, in order per direction.

Only CopyEvent.await_here blocks on a device. A tensor that is used on another stream than the one that it was created
on must be registered with `keep`, because a caching allocator reuses freed memory on the stream of its creation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from gossamer.errors import GossamerError


class Way(StrEnum):
    """A direction of copies; each has its own stream."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class CopyEvent(Protocol):
    """An event: complete when all earlier work of one stream is done."""

    def is_past(self) -> bool:
        """Whether it is complete, without blocking."""

    def await_here(self) -> None:
        """Block the calling thread until it is complete."""

    def precede(self, way: Way) -> None:
        """Make later copies of this direction wait for it, without blocking the caller."""

    def precede_current(self) -> None:
        """Make later work of the caller's current stream wait for it, without blocking the caller."""


class DeviceCopies(Protocol):
    """Copies between one device and host memory."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory, uint8 of shape (nbytes,)."""

    def mark(self) -> CopyEvent:
        """Record an event on the caller's current stream."""

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        """Begin a copy between contiguous uint8 tensors of shape (n,), one of them pinned and one on the device."""

    def keep(self, way: Way, tensor: Tensor) -> None:
        """Keep the memory of a device tensor from being reused until the copies that have begun are complete."""

    def record(self, way: Way) -> CopyEvent:
        """Record an event after all copies of this direction so far."""


class Past:
    """A completed event."""

    def is_past(self) -> bool:
        return True

    def await_here(self) -> None: ...

    def precede(self, way: Way) -> None: ...

    def precede_current(self) -> None: ...


class BlockingCopies:
    """Copies that are complete when the call returns: within host memory, and of MPS, whose only command queue runs
    them after the kernels that were called before."""

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> CopyEvent:
        return Past()

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def keep(self, way: Way, tensor: Tensor) -> None: ...

    def record(self, way: Way) -> CopyEvent:
        return Past()


@dataclass(frozen=True)
class CudaEvent:
    """An event recorded on a stream. streams: the device's copy streams, by direction."""

    event: torch.cuda.Event
    device: torch.device
    streams: Mapping[Way, torch.cuda.Stream]

    def is_past(self) -> bool:
        return bool(self.event.query())

    def await_here(self) -> None:
        self.event.synchronize()  # waits for this event only, not for other streams

    def precede(self, way: Way) -> None:
        self.streams[way].wait_event(self.event)

    def precede_current(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaCopies:
    """Copies of one CUDA device: both directions concurrently, and concurrent with its kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in Way}

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self) -> CopyEvent:
        return self._recorded(torch.cuda.current_stream(self._device))

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)

    def keep(self, way: Way, tensor: Tensor) -> None:
        tensor.record_stream(self._streams[way])

    def record(self, way: Way) -> CopyEvent:
        return self._recorded(self._streams[way])

    def _recorded(self, stream: torch.cuda.Stream) -> CudaEvent:
        event = torch.cuda.Event(blocking=True)  # a waiting thread yields its core
        event.record(stream)
        return CudaEvent(event, self._device, self._streams)


_KINDS: dict[str, Callable[[torch.device], DeviceCopies]] = {
    "cuda": CudaCopies,
    "cpu": lambda _: BlockingCopies(),
    "mps": lambda _: BlockingCopies(),
}


@cache
def copies_for(device: torch.device) -> DeviceCopies:
    """Return the copies for this device. Raises GossamerError for an unsupported type of device."""
    if device.type not in _KINDS:
        raise GossamerError(
            f"tensors on {device} cannot be sent: copies are implemented for {', '.join(_KINDS)} "
            'only. Train on one of these: model.to("cpu").'
        )
    return _KINDS[device.type](device)
