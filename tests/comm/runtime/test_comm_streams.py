"""Communication streams: one a device, which are current within a block, and moments of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.noted_streams import FIRST, SECOND, NotedStreams

from gossamer.comm.runtime.comm_streams import CommStreams, use_on_current_stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    return NotedStreams(monkeypatch)


def check_entered() -> None:
    with CommStreams([SECOND, FIRST, SECOND]).entered():
        names = [torch.cuda.current_stream(device).name for device in (FIRST, SECOND)]  # type: ignore[attr-defined]
        assert names == ["own of cuda:0", "own of cuda:1"]
        assert torch.cuda.current_device() == SECOND.index
    names = [torch.cuda.current_stream(device).name for device in (FIRST, SECOND)]  # type: ignore[attr-defined]
    assert names == ["cuda:0's", "cuda:1's"]


def test_within_the_block_each_devices_own_is_current_and_the_first_device(streams: NotedStreams) -> None:
    check_entered()
    assert [stream.device for stream in streams.made] == [SECOND, FIRST]


def test_the_check_catches_another_current_device(streams: NotedStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def in_order(self: CommStreams) -> Iterator[None]:
        first, second = self._streams.values()
        with torch.cuda.stream(first), torch.cuda.stream(second):
            yield

    monkeypatch.setattr(CommStreams, "entered", in_order)
    with pytest.raises(AssertionError):
        check_entered()


def test_a_moment_is_past_when_every_devices_stream_has_come_to_it(streams: NotedStreams) -> None:
    own = CommStreams([FIRST, SECOND])
    with own.entered():
        finished = own.mark()
    streams.made[0].has_run = True
    assert not finished.is_past()
    streams.made[1].has_run = True
    assert finished.is_past()
    finished.precede_current()
    assert streams.orders()[-2:] == ["cuda:0's waits for own of cuda:0", "cuda:1's waits for own of cuda:1"]


class OnDevice:
    """A tensor that notes for which stream its memory is kept."""

    is_cuda = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.kept_for = device, ""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.kept_for = stream.name  # type: ignore[attr-defined]


@pytest.mark.usefixtures("streams")
def test_memory_is_kept_for_the_stream_of_its_own_device() -> None:
    tensors = [OnDevice(FIRST), OnDevice(SECOND)]
    use_on_current_stream([*tensors, None, torch.ones(1)])  # type: ignore[list-item]
    assert [tensor.kept_for for tensor in tensors] == ["cuda:0's", "cuda:1's"]


def test_processors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    own = CommStreams([torch.device("cpu"), torch.device("meta")])
    with own.entered():
        moment = own.mark()
    moment.precede_current()
    assert moment.is_past()
