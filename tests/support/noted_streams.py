"""torch.cuda's streams where there is no GPU: they only note who asked them for what, in which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@dataclass(eq=False)
class Stream:
    """has_run: whether it has done all that it was given."""

    name: str
    device: torch.device
    streams: NotedStreams
    has_run: bool = False

    def record_event(self) -> Event:
        self.streams.note("record_event", f"{self.name} record_event")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.streams.note("wait_event", f"{self.name} waits for {event.stream.name}")

    def synchronize(self) -> None:
        self.streams.note("synchronize", f"{self.name} synchronize")


@dataclass(eq=False)
class Event:
    """Past once its stream has run."""

    stream: Stream

    def query(self) -> bool:
        self.stream.streams.note("query")
        return self.stream.has_run

    def synchronize(self) -> None:
        self.stream.streams.note("synchronize")


@dataclass
class Entered(threading.local):
    """This thread's current streams, by device, and its devices, the current one last."""

    streams: dict[torch.device, Stream] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=lambda: [FIRST])


class NotedStreams:
    """made: those of communication threads, in order; noted: (thread, call, how streams are ordered by it)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, str, str]] = []
        self.made: list[Stream] = []
        self._of_the_loop = {device: Stream(f"{device}'s", device, self) for device in (FIRST, SECOND)}
        self._entered = Entered()
        patch.setattr(torch.cuda, "Stream", self._make)
        patch.setattr(torch.cuda, "current_stream", self._current)
        patch.setattr(torch.cuda, "current_device", lambda: self._entered.devices[-1].index)
        patch.setattr(torch.cuda, "stream", self._enter)

    def note(self, call: str, order: str = "") -> None:
        self.noted.append((threading.current_thread().name, call, order))

    def calls(self, thread: str) -> list[str]:
        """Of a thread."""
        return [call for name, call, _ in self.noted if name.startswith(thread)]

    def orders(self) -> list[str]:
        """How streams were ordered, in all threads."""
        return [order for _, _, order in self.noted if order]

    def _make(self, device: torch.device) -> Stream:
        self.made.append(Stream(f"own of {device}", device, self))
        return self.made[-1]

    def _current(self, device: torch.device) -> Stream:
        return self._entered.streams.get(device, self._of_the_loop[device])

    @contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        before = self._current(stream.device)
        self._entered.streams[stream.device] = stream
        self._entered.devices.append(stream.device)
        yield
        self._entered.streams[stream.device] = before
        self._entered.devices.pop()
