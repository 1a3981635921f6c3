"""Communication streams: a CUDA stream of a communication thread's own for each device of its model, ordered by events.

On processors there are none, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamMoment:
    """When some streams have done all that they had been given. events: of one stream of each device."""

    events: Mapping[torch.device, torch.cuda.Event]

    def is_past(self) -> bool:
        """Whether it has come; does not wait."""
        return all(event.query() for event in self.events.values())

    def precede_current(self) -> None:
        """What the caller's current streams are given from now on waits for it; the caller does not."""
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)


class CommStreams:
    """One stream for each CUDA device of these, kept by device."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        there = dict.fromkeys(device for device in devices if device.type == "cuda")
        self._streams = {device: torch.cuda.Stream(device) for device in there}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def mark(self) -> StreamMoment:
        """The moment when the caller's current stream of each device has done what it was given up to now."""
        return StreamMoment({device: torch.cuda.current_stream(device).record_event() for device in self._streams})

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block these are the caller's current streams, and the first device is the current one."""
        with ExitStack() as entered:
            for stream in reversed(self._streams.values()):
                entered.enter_context(torch.cuda.stream(stream))
            yield


def use_on_current_stream(tensors: Iterable[Tensor | None]) -> None:
    """Tell the allocator that the current stream uses tensors that a communication thread's stream has made."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
