"""Communication thread on a device: the training thread records and waits for events, and what is read is held."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gossamer.runtime import comm_thread
from gossamer.runtime.comm_thread import CommThread

DEVICE = torch.device("cuda", 0)


class Event:
    """Past once its stream has run."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        self.stream.device.note("query")
        return self.stream.has_run

    def synchronize(self) -> None:
        self.stream.device.note("synchronize")


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.has_run = device, False

    def record_event(self) -> Event:
        self.device.note("record_event")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.device.note("wait_event")

    def synchronize(self) -> None:
        self.device.note("synchronize")


class Device:
    """torch.cuda's streams, which only note who called what."""

    def __init__(self) -> None:
        self.called: list[tuple[str, str]] = []
        self.training, self.made = Stream(self), []
        self.current = threading.local()

    def note(self, what: str) -> None:
        self.called.append((threading.current_thread().name, what))

    def stream_of(self, device: Any) -> Stream:
        stream = Stream(self)
        stream.device = self
        self.made.append(stream)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.stream = stream
        yield
        self.current.stream = self.training

    def of(self, thread: str) -> list[str]:
        return [what for name, what in self.called if name.startswith(thread)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Stream", found.stream_of)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: getattr(found.current, "stream", found.training))
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    return found


def test_the_training_thread_only_records_and_waits_for_events(device: Device) -> None:
    thread = CommThread(DEVICE)
    assert thread.submit(lambda: 7).wait() == 7
    thread.close()
    assert device.of("MainThread") == ["record_event", "wait_event"]
    assert "synchronize" not in device.of("gossamer-comm")
    assert device.of("gossamer-comm")[:2] == ["wait_event", "record_event"]


class Input:
    """What a job holds, such as a tensor."""


def given(thread: CommThread) -> weakref.ref[Input]:
    tensor = Input()
    found = weakref.ref(tensor)

    def job() -> bool:
        return tensor is not None

    assert thread.submit(job).wait()
    return found


def check_held(device: Device) -> None:
    thread = CommThread(DEVICE)
    tensor = given(thread)
    thread.submit(lambda: None).wait()
    gc.collect()
    held = tensor() is not None
    device.made[0].has_run = True
    thread.submit(lambda: None).wait()
    thread.submit(lambda: None).wait()  # after the one before was looked at
    gc.collect()
    released = tensor() is None
    thread.close()
    assert held, "memory may be given away that a stream reads"
    assert released


def test_what_a_job_holds_is_held_until_its_stream_has_done_it(device: Device) -> None:
    check_held(device)


def test_the_check_catches_a_job_that_is_let_go_when_it_was_given(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommThread, "_hold", lambda self, ticket: setattr(ticket, "held", None))
    with pytest.raises(AssertionError, match="given away"):
        check_held(device)


def test_on_processors_nothing_is_held_and_no_stream_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_thread.torch.cuda, "Stream", None)
    thread = CommThread(torch.device("cpu"))
    tensor = given(thread)
    gc.collect()
    assert tensor() is None
    thread.close()
