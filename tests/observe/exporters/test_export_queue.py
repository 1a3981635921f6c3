"""The queue between training and a tool: whatever the tool does, training goes on, and what is missing is counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import pytest
from support.exporting import MANY, attached, logged, noticed, step
from support.processes import SOON_SECONDS

from gossamer import events
from gossamer.events import Event, Noticed
from gossamer.observe.exporters.export_queue import Exporter, ExportQueue, ExportThread


class Tool:
    """Keeps what it takes, unless it is told to fail."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.taken: list[Event] = []
        self.fails = fails
        self.closed = False

    def take(self, happened: Sequence[Event]) -> None:
        if self.fails is not None:
            raise self.fails
        self.taken += happened

    def close(self) -> None:
        self.closed = True
        if self.fails is not None:
            raise self.fails


def give(queue: ExportQueue, *happened: Event) -> None:
    for event in happened:
        queue(event)


def test_numbers_come_through_in_order_and_nothing_else() -> None:
    tool = Tool()
    queue = ExportQueue("jsonl:x", lambda: tool)
    happened = [attached(), step(1), logged(1, loss=0.5), step(2)]
    with noticed() as said:
        give(queue, happened[0], Noticed(message="no number"), *happened[1:])
        assert queue.pump()
        queue.finish()
        queue.tell_dropped()
    assert tool.taken == happened
    assert tool.closed
    assert not said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd\n  tool"), SystemExit(3)])
def test_whatever_a_tool_raises_is_said_once_and_counted(error: BaseException) -> None:
    tool = Tool(error)
    queue = ExportQueue("tensorboard:x", lambda: tool)
    with noticed() as said:
        for number in range(1, 4):
            give(queue, step(number))
            assert not queue.pump()
        tool.fails = None
        give(queue, step(4))
        assert queue.pump()
        queue.finish()
        queue.tell_dropped()
    first, last = said
    assert first.startswith(f"tensorboard:x takes no numbers of this worker now ({error.args[-1]}".replace("\n  ", " "))
    assert "Training goes on" in first
    assert last == "3 of 4 events of this worker never came to tensorboard:x."
    assert [event.step for event in tool.taken] == [4]  # type: ignore[attr-defined]


def test_a_tool_that_cannot_be_opened_yet_gets_all_once_it_can() -> None:
    tool, attempts = Tool(), [0]

    def begin() -> Exporter:
        attempts[0] += 1
        if attempts[0] < 3:
            raise OSError(98, "Address already in use")
        return tool

    queue = ExportQueue("prometheus:9400", begin)
    with noticed() as said:
        for number in range(1, 4):
            give(queue, step(number))
            assert queue.pump() is (number == 3)
        queue.tell_dropped()
    assert len(tool.taken) == 3
    assert len(said) == 1
    assert "(Address already in use)" in said[0]


def test_a_full_queue_drops_what_is_new_by_how_many_numbers_it_holds() -> None:
    tool = Tool()
    queue = ExportQueue("wandb:x", lambda: tool, room=2500)
    with noticed() as said:
        give(queue, *(logged(number, **MANY) for number in range(1, 6)), step(5))  # 1001 numbers each
        assert queue.dropped == 3
        assert queue.pump()
        give(queue, logged(6, **MANY))
        assert queue.pump()
        queue.tell_dropped()
    assert [event.step for event in tool.taken] == [1, 2, 5, 6]  # type: ignore[attr-defined]
    assert len(said) == 2
    assert "it does not keep up" in said[0]
    assert said[1].startswith("3 of 7 events")


def test_a_child_process_puts_nothing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool()
    queue = ExportQueue("jsonl:x", lambda: tool)
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        give(queue, step(1))
    assert queue.pump()
    assert not tool.taken


class Stuck(Tool):
    """A disk that never answers, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def take(self, happened: Sequence[Event]) -> None:
        self.entered.set()
        self.let_go.wait()


def test_a_tool_that_never_answers_blocks_neither_a_step_nor_the_end() -> None:
    """The broken twin is a listener that calls the tool itself: its first step waits for ever."""
    tool = Stuck()
    queue = ExportQueue("jsonl:/nfs/x", lambda: tool, room=10)
    with noticed() as said:
        thread = ExportThread(queue)
        events.emit(step(1))
        assert tool.entered.wait(SOON_SECONDS)
        for number in range(2, 50):
            events.emit(step(number))
        thread.ask_to_close()
        thread.wait(time.monotonic())  # no time at all
        tool.let_go.set()
        thread.wait(time.monotonic() + SOON_SECONDS)
    assert queue.dropped >= 38
    assert "it does not keep up" in said[0]
    assert said[1].endswith("events of this worker never came to jsonl:/nfs/x.")


def test_the_thread_takes_all_that_is_left_at_the_end() -> None:
    tool = Tool()
    thread = ExportThread(ExportQueue("jsonl:x", lambda: tool))
    for number in range(1, 1001):
        events.emit(step(number))
    thread.ask_to_close()
    events.emit(step(1001))
    thread.wait(time.monotonic() + SOON_SECONDS)
    assert len(tool.taken) == 1000
    assert tool.closed
    assert not events.observed()
