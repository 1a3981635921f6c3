"""Communication streams: a CUDA stream per device for a communication thread, ordered by events.

Without CUDA devices there are no streams, and nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamMoment:
    """Events of several streams, one per device; past when all of them are complete."""

    events: Mapping[torch.device, torch.cuda.Event]

    def is_past(self) -> bool:
        """Whether all events are complete, without blocking."""
        return all(event.query() for event in self.events.values())

    def precede_current(self) -> None:
        """Make later work of the caller's current streams wait for the events, without blocking the caller."""
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)


class CommStreams:
    """One stream per CUDA device."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        there = dict.fromkeys(device for device in devices if device.type == "cuda")
        self._streams = {device: torch.cuda.Stream(device) for device in there}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def mark(self) -> StreamMoment:
        """Record an event on the caller's current stream of each device."""
        return StreamMoment({device: torch.cuda.current_stream(device).record_event() for device in self._streams})

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager that makes these the caller's current streams, and the first device the current device."""
        with ExitStack() as entered:
            for stream in reversed(self._streams.values()):
                entered.enter_context(torch.cuda.stream(stream))
            yield


def use_on_current_stream(tensors: Iterable[Tensor | None]) -> None:
    """Register tensors that a communication thread's stream created with the current stream, for the allocator."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
