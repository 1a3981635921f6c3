"""A device that is not there, on tensors of this machine: every copy is put off until an event that covers it is waited
for, and what is done too early or too late is found out.

Three streams of work: the computing, and the copies of each way. None of them moves unless somebody waits for it; what
the current stream is to find, this thread finds. A copy reads and writes memory by its address, so that memory which
was freed meanwhile, and which `keep` was not called for, is an error: on a device it would be another tensor's.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gossamer.comm.staging.device_copies import BlockingCopies, CopyEvent, Way

COMPUTING = "computing"
GARBAGE = 0xA5


class Misused(AssertionError):
    """Something was used before it was there, or while something else used it."""


@dataclass(frozen=True)
class DeferredEvent:
    device: DeferredDevice
    stream: str
    number: int  # of pieces of work that the stream had been given

    def is_past(self) -> bool:
        if self.device.draws.random() < self.device.pace:
            self.await_here()  # it went on by itself
        return self.device.done[self.stream] >= self.number

    def await_here(self) -> None:
        self.device.run(self.stream, self.number)

    def precede(self, way: Way) -> None:
        self.device.give(way, self.await_here)

    def precede_current(self) -> None:
        self.await_here()  # the current stream is this thread, which computes at once what is not `computed`


class Copy:
    """A copy that was begun. Without `keep` it does not hold the device's memory."""

    def __init__(self, way: Way, target: Tensor, source: Tensor) -> None:
        self.device_side, self.pinned = (source, target) if way is Way.TO_HOST else (target, source)
        self.to, self.of, self.nbytes = target.data_ptr(), source.data_ptr(), target.numel()
        self.memory = StorageWeakRef(self.device_side.untyped_storage())
        self.kept: Tensor | None = None
        self.storage = self.device_side.untyped_storage().data_ptr()
        del self.device_side

    def __call__(self) -> None:
        if self.memory.expired():
            raise Misused("memory was freed while a copy used it: nobody had called keep")
        ctypes.memmove(self.to, self.of, self.nbytes)
        self.kept = None

    def touches(self, begin: int, end: int) -> bool:
        own = self.pinned.data_ptr()
        return own < end and begin < own + self.nbytes


class DeferredDevice:
    """DeviceCopies. pace: how often the device has gone on by itself, of the times when it is asked whether it has."""

    def __init__(self, seed: int = 0, pace: float = 0.3) -> None:
        self.draws, self.pace = random.Random(seed), pace
        self.work: dict[str, deque[Callable[[], None]]] = {each: deque() for each in (COMPUTING, *Way)}
        self.done = dict.fromkeys(self.work, 0)
        self.pinned_bytes = self.most_pinned_bytes = 0

    # -- what a test does on it ----------------------------------------------------------------------------------------

    def computed(self, values: Tensor) -> Tensor:
        """A tensor that the device will have computed; until then it holds something else."""
        found = torch.empty_like(values)
        found.view(-1).view(torch.uint8).fill_(GARBAGE)

        def compute() -> None:
            found.copy_(values)

        self.give(COMPUTING, compute)
        return found

    def synchronize(self) -> None:
        """Have all computing done, and whatever it waits for; not the copies that nothing waits for."""
        self.run(COMPUTING, self.done[COMPUTING] + len(self.work[COMPUTING]))

    def check_unused(self, begin: int, nbytes: int) -> None:
        """Raise Misused where a copy is on its way to or from these addresses."""
        if any(each.touches(begin, begin + nbytes) for each in self.under_way()):
            raise Misused("memory is used while a copy is on its way there, or from there")

    def under_way(self) -> list[Copy]:
        return [each for way in Way for each in self.work[way] if isinstance(each, Copy)]

    def give(self, stream: str, work: Callable[[], None]) -> None:
        self.work[stream].append(work)

    def run(self, stream: str, number: int) -> None:
        while self.done[stream] < number:
            work = self.work[stream].popleft()
            self.done[stream] += 1
            work()

    # -- DeviceCopies --------------------------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def mark(self) -> DeferredEvent:
        return self._event(COMPUTING)

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        assert target.is_contiguous()
        assert source.is_contiguous()
        copy = Copy(way, target, source)
        self.check_unused(copy.pinned.data_ptr(), copy.nbytes)
        self.give(way, copy)

    def keep(self, way: Way, tensor: Tensor) -> None:
        for each in self.under_way():
            if each in self.work[way] and each.storage == tensor.untyped_storage().data_ptr():
                each.kept = tensor

    def record(self, way: Way) -> DeferredEvent:
        return self._event(way)

    def _event(self, stream: str) -> DeferredEvent:
        return DeferredEvent(self, stream, self.done[stream] + len(self.work[stream]))


class OneQueueDevice(DeferredDevice):
    """A device with one queue, such as MPS, and BlockingCopies: a copy runs all earlier work first, then returns.

    in_order: False for a device whose copies overtake its computing, on which BlockingCopies are wrong.
    """

    def __init__(self, seed: int = 0, pace: float = 0.3, *, in_order: bool = True) -> None:
        super().__init__(seed, pace)
        self._in_order, self._copies = in_order, BlockingCopies()

    def mark(self) -> CopyEvent:  # type: ignore[override]
        return self._copies.mark()

    def copy(self, way: Way, target: Tensor, source: Tensor) -> None:
        if self._in_order:
            self.synchronize()
        self._copies.copy(way, target, source)

    def keep(self, way: Way, tensor: Tensor) -> None:
        self._copies.keep(way, tensor)

    def record(self, way: Way) -> CopyEvent:  # type: ignore[override]
        return self._copies.record(way)
