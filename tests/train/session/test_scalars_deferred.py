"""Deferred metrics: numbers on a GPU are logged from the communication thread, as they were when they were given."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.virtual_workers import heard, subscribed

from gossamer import events
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.train.session import scalars
from gossamer.train.session.scalars import DeferredMetrics


@pytest.fixture
def thread() -> Any:
    made = CommThread([torch.device("cpu")])
    yield made
    made.close()


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every tensor lay on a GPU."""
    monkeypatch.setattr(scalars, "_lies_elsewhere", torch.is_tensor)


def test_numbers_that_are_here_are_told_at_once(thread: CommThread) -> None:
    with heard(events.Logged) as told:
        DeferredMetrics(thread).log(3, {"loss": torch.tensor(2.0), "rate": 0.5})
        assert [(event.step, dict(event.values)) for event in told] == [(3, {"loss": 2.0, "rate": 0.5})]


@pytest.mark.usefixtures("_elsewhere")
def test_those_on_a_gpu_are_told_by_the_other_thread_as_they_were(thread: CommThread) -> None:
    by, told = list[str](), list[Any]()

    def listen(event: events.Event) -> None:
        by.append(threading.current_thread().name)
        told.append(event)

    metrics, loss, held = DeferredMetrics(thread), torch.tensor(2.0), threading.Event()
    with subscribed(listen):
        thread.submit(held.wait)
        metrics.log(3, {"loss": loss})
        assert told == []
        loss.fill_(7.0)
        held.set()
        metrics.finish()
    assert [dict(event.values) for event in told] == [{"loss": 2.0}]
    assert by == ["gossamer-comm"]


@pytest.mark.usefixtures("_elsewhere")
def test_after_the_end_they_are_told_at_once(thread: CommThread) -> None:
    thread.close()
    with heard(events.Logged) as told:
        DeferredMetrics(thread).log(1, {"loss": torch.tensor(2.0)})
        assert [dict(event.values) for event in told] == [{"loss": 2.0}]


def test_what_is_no_number_is_refused_at_once(thread: CommThread) -> None:
    with pytest.raises(TypeError, match=r"session\.log\(loss=loss\.mean\(\)\)"):
        DeferredMetrics(thread).log(1, {"loss": torch.ones(2, device="meta")})
