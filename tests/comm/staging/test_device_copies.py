"""Device copies: calls of torch.cuda, on streams that only note them, and the copies of each device. No GPU runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gossamer.comm.staging import device_copies
from gossamer.comm.staging.device_copies import BlockingCopies, CudaCopies, Way, copies_for
from gossamer.errors import GossamerError

DEVICE = torch.device("cuda", 1)


class Event:
    stream: Stream

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.noted.append((stream.name, "record"))

    def query(self) -> bool:
        self.stream.noted.append((self.stream.name, "query"))
        return False

    def synchronize(self) -> None:
        self.stream.noted.append((self.stream.name, "event synchronize"))


class Stream:
    def __init__(self, name: str, noted: list[Any]) -> None:
        self.name, self.noted = name, noted

    def wait_event(self, event: Event) -> None:
        self.noted.append((self.name, f"wait for {event.stream.name}"))


class Tensor:
    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.noted.append("copy")

    def record_stream(self, stream: Stream) -> None:
        self.noted.append(("keep for", stream.name))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    names = iter(Way)

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        found.append(("enter", stream.name))
        yield
        found.append(("leave", stream.name))

    def made(device: torch.device) -> Stream:
        assert device == DEVICE
        return Stream(next(names), found)

    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"current of {device}", found))
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    return found


def test_a_copy_runs_on_the_stream_of_its_way_and_never_waits(noted: list[Any]) -> None:
    copies, tensor = CudaCopies(DEVICE), Tensor(noted)
    copies.copy(Way.TO_HOST, tensor, tensor)  # type: ignore[arg-type]
    copies.keep(Way.TO_HOST, tensor)  # type: ignore[arg-type]
    copies.record(Way.TO_HOST)
    assert noted == [
        ("enter", "to host"),
        "copy",
        ("leave", "to host"),
        ("keep for", "to host"),
        ("to host", "record"),
    ]


def test_events_order_streams_and_only_one_call_waits_here(noted: list[Any]) -> None:
    copies = CudaCopies(DEVICE)
    ready = copies.mark()
    ready.precede(Way.TO_DEVICE)
    done = copies.record(Way.TO_DEVICE)
    done.precede_current()
    assert not done.is_past()
    done.await_here()
    assert noted == [
        ("current of cuda:1", "record"),
        ("to device", "wait for current of cuda:1"),
        ("to device", "record"),
        ("current of cuda:1", "wait for to device"),
        ("to device", "query"),
        ("to device", "event synchronize"),
    ]


def test_memory_in_between_is_pinned(noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(device_copies.torch, "empty", lambda nbytes, **how: asked.append({"nbytes": nbytes, **how}))
    CudaCopies(DEVICE).pinned(100)
    assert asked == [{"nbytes": 100, "dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_each_device_has_its_copies_and_others_are_refused() -> None:
    assert isinstance(copies_for(torch.device("cpu")), BlockingCopies)
    assert isinstance(copies_for(torch.device("mps")), BlockingCopies)
    assert copies_for(torch.device("cpu")) is copies_for(torch.device("cpu"))
    with pytest.raises(GossamerError, match=r"tensors on meta cannot be sent.*model\.to"):
        copies_for(torch.device("meta"))
