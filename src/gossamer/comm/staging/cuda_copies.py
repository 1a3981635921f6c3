"""CUDA copies: two streams of their own, events instead of synchronization. Has not run on a GPU.

source: torch.cuda.Stream, torch.cuda.Event and Tensor.record_stream, as their docstrings describe them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.staging.device_copies import CopyEvent, Way


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
