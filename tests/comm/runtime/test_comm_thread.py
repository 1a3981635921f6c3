"""Communication thread on a device: the training thread records and waits for events, and what is read is held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection

import pytest
import torch
from support.noted_streams import FIRST, SECOND, NotedStreams

from gossamer.comm.runtime.comm_streams import CommStreams
from gossamer.comm.runtime.comm_thread import CommThread


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    return NotedStreams(monkeypatch)


def test_the_training_thread_only_records_and_waits_for_events(streams: NotedStreams) -> None:
    thread = CommThread([FIRST])
    assert thread.submit(lambda: 7).wait() == 7
    thread.close()
    assert streams.calls("MainThread") == ["record_event", "wait_event"]
    assert streams.calls("gossamer-comm") == ["wait_event", "record_event", "query"]


def check_devices(streams: NotedStreams) -> None:
    """A job on two devices, each of which is ordered by its own events, in the thread and in the one beside it."""
    thread = CommThread([FIRST, SECOND, FIRST])
    for each in (thread, thread.sibling()):
        streams.noted.clear()
        within = each.submit(lambda: [torch.cuda.current_stream(device).name for device in (FIRST, SECOND)]).wait()
        assert within == ["own of cuda:0", "own of cuda:1"]
        for device in ("cuda:0", "cuda:1"):
            assert [call for call in streams.orders() if device in call] == [
                f"{device}'s record_event",
                f"own of {device} waits for {device}'s",
                f"own of {device} record_event",
                f"{device}'s waits for own of {device}",
            ]
    thread.close()


def test_each_device_has_a_stream_of_its_own(streams: NotedStreams) -> None:
    check_devices(streams)


def test_the_check_catches_the_firsts_stream_for_the_second(
    streams: NotedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_first(self: CommStreams, devices: Collection[torch.device]) -> None:
        self._streams = dict.fromkeys(devices, torch.cuda.Stream(next(iter(devices))))

    monkeypatch.setattr(CommStreams, "__init__", of_the_first)
    with pytest.raises(AssertionError):
        check_devices(streams)


class Input:
    """What a job holds, such as a tensor."""


def given(thread: CommThread) -> weakref.ref[Input]:
    tensor = Input()
    found = weakref.ref(tensor)

    def job() -> bool:
        return tensor is not None

    assert thread.submit(job).wait()
    return found


def check_held(streams: NotedStreams) -> None:
    thread = CommThread([FIRST, SECOND])
    tensor = given(thread)
    thread.submit(lambda: None).wait()
    gc.collect()
    held = tensor() is not None
    streams.made[0].has_run = True
    thread.submit(lambda: None).wait()
    gc.collect()
    held = held and tensor() is not None
    streams.made[1].has_run = True
    thread.submit(lambda: None).wait()
    gc.collect()
    released = tensor() is None
    thread.close()
    assert held, "memory may be given away that a stream reads"
    assert released


def test_what_a_job_holds_is_held_until_its_stream_has_done_it(streams: NotedStreams) -> None:
    check_held(streams)


def test_the_check_catches_a_job_that_is_let_go_when_it_was_given(
    streams: NotedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CommThread, "_hold", lambda self, finished, job: None)
    with pytest.raises(AssertionError, match="given away"):
        check_held(streams)


def test_on_processors_nothing_is_held_and_no_stream_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", None)
    thread = CommThread([torch.device("cpu")])
    tensor = given(thread)
    gc.collect()
    assert tensor() is None
    thread.close()
