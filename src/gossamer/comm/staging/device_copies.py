"""Device copies: what staging asks of a device. Copies run beside the computing, one after another in each way.

Nothing here waits for a device but CopyEvent.await_here. Who hands a tensor to another stream than the one that it was
made on says so (`keep`), since a caching allocator gives freed memory to whoever asks next on the stream of its making.
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
    """A direction of copies; each is a stream of its own."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


class CopyEvent(Protocol):
    """A moment: all that one stream had been given when it was recorded has been done."""

    def is_past(self) -> bool:
        """Whether it has come; does not wait."""

    def await_here(self) -> None:
        """The calling thread waits for it."""

    def precede(self, way: Way) -> None:
        """Copies of this way that are given from now on wait for it; the caller does not."""

    def precede_current(self) -> None:
        """What the caller's current stream is given from now on waits for it; the caller does not."""


class DeviceCopies(Protocol):
    """Copies between one device and this machine's memory."""

    def pinned(self, nbytes: int) -> Tensor:
        """(nbytes,) of uint8 in this machine's memory, where the device itself reads and writes."""

    def mark(self) -> CopyEvent:
        """The moment when what the caller's current stream was given up to now has been done."""

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        """Begin a copy between contiguous (n,) of uint8, of which one is pinned and one the device's."""

    def keep(self, way: Way, tensor: Tensor) -> None:
        """The memory of the device's `tensor` is used for nothing else before copies begun so far are done."""

    def record(self, way: Way) -> CopyEvent:
        """The moment when all copies of this way that were begun so far are done."""


class Past:
    """A moment that has come."""

    def is_past(self) -> bool:
        return True

    def await_here(self) -> None: ...

    def precede(self, way: Way) -> None: ...

    def precede_current(self) -> None: ...


class HostCopies:
    """Copies within this machine's memory."""

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
    """An event that was recorded on a stream. streams: of the device's copies, by way."""

    event: torch.cuda.Event
    device: torch.device
    streams: Mapping[Way, torch.cuda.Stream]

    def is_past(self) -> bool:
        return bool(self.event.query())

    def await_here(self) -> None:
        self.event.synchronize()  # of this event alone: other streams go on, and are not waited for

    def precede(self, way: Way) -> None:
        self.streams[way].wait_event(self.event)

    def precede_current(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CudaCopies:
    """Copies of one CUDA device: both ways at once, beside its kernels."""

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
        event = torch.cuda.Event(blocking=True)  # a thread that waits for a device leaves its core to others
        event.record(stream)
        return CudaEvent(event, self._device, self._streams)


_KINDS: dict[str, Callable[[torch.device], DeviceCopies]] = {"cuda": CudaCopies, "cpu": lambda _: HostCopies()}


@cache
def copies_for(device: torch.device) -> DeviceCopies:
    """The copies of tensors of this device. Raises GossamerError for a kind of device that has none."""
    if device.type not in _KINDS:
        raise GossamerError(
            f"tensors on {device} cannot be sent: copies beside the computing are written for {', '.join(_KINDS)} "
            'only. Train on one of these: model.to("cpu").'
        )
    return _KINDS[device.type](device)
