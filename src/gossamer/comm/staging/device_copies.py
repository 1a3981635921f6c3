"""Device copies: what staging asks of a device. Copies run beside the computing, one after another in each way.

Nothing here waits for a device but CopyEvent.await_here. Who hands a tensor to another stream than the one that it was
made on says so (`keep`), since a caching allocator gives freed memory to whoever asks next on the stream of its making.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from torch import Tensor


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
