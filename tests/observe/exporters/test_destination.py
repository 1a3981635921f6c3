"""Destinations: their text, and what each rank opens for them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.exporting import MANY, attached, logged, noticed, step
from support.processes import SOON_SECONDS, free_port

from gossamer import events
from gossamer.events import Closed, Event, Noticed
from gossamer.observe.exporters import destination
from gossamer.observe.exporters.destination import (
    Destination,
    Exporter,
    ExportQueue,
    ExportThread,
    RankPlace,
    host_and_port,
    read_destination,
    read_destinations,
)

CLOSED = Closed(steps=2, digest="d", residual_bytes=0, bucket_bytes=0)


@pytest.mark.parametrize("text", ["tensorboard:runs/tb", "prometheus:9400", "prometheus:0.0.0.0:9400",
                                  "otlp:http://localhost:4318", "jsonl:a:b,c.jsonl"])  # fmt: skip
def test_what_is_read_is_written_the_same(text: str) -> None:
    assert str(read_destination(text)) == text


@pytest.mark.parametrize("text", ["", "tensorboard", "tensorboard:", "tb:runs", "runs/x.jsonl", "Jsonl:x"])
def test_what_is_no_destination_is_answered_by_the_list(text: str) -> None:
    with pytest.raises(ValueError, match="tensorboard:DIR, wandb:PROJECT, mlflow:URI, prometheus:PORT, otlp:ENDPOINT"):
        read_destination(text)


@pytest.mark.parametrize("text", ["prometheus:x", "prometheus:0", "prometheus:70000", "prometheus:-1", "otlp:4318"])
def test_what_cannot_be_meant_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as"):
        read_destination(text)


def test_a_tool_that_is_not_there_comes_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "find_spec", lambda name: None)
    for text in ("wandb:x", "mlflow:x", "tensorboard:x", "prometheus:9400"):
        with pytest.raises(ValueError, match="pip install") as refused:
            read_destination(text)
        assert f'{sys.executable} -m pip install "gossamer[{text.partition(":")[0]}]"' in str(refused.value)
    assert read_destination("jsonl:x")
    assert read_destination("otlp:http://localhost:4318")


def test_several_are_distinguished_by_what_begins_them() -> None:
    text = "tensorboard:a,b,jsonl:c.jsonl,otlp:http://localhost:4318"
    assert [str(each) for each in read_destinations(text)] == [
        "tensorboard:a,b", "jsonl:c.jsonl", "otlp:http://localhost:4318",
    ]  # fmt: skip
    assert read_destinations("") == ()


def test_paths_are_those_of_where_they_were_written() -> None:
    assert str(Destination("jsonl", "x/y").at(Path("/here"))) == "jsonl:/here/x/y"
    assert str(Destination("tensorboard", "/there").at(Path("/here"))) == "tensorboard:/there"
    assert str(Destination("wandb", "team/project").at(Path("/here"))) == "wandb:team/project"


def test_a_port_is_on_loopback() -> None:
    assert host_and_port("9400") == ("127.0.0.1", 9400)
    assert host_and_port("10.0.0.1:9400") == ("10.0.0.1", 9400)


def train(rank: int, *texts: str) -> list[str]:
    with noticed() as said:
        destination.begin([read_destination(text) for text in texts], RankPlace(rank, rank))
        for event in (attached(), step(1), logged(1, **{"train/loss": 0.5 + rank}), step(2), CLOSED):
            events.emit(event)
    assert not events.observed()
    return said


def test_every_rank_has_its_own_files(tmp_path: Path) -> None:
    for rank in range(2):
        assert not train(rank, f"jsonl:{tmp_path}/metrics.jsonl", f"tensorboard:{tmp_path}/tb")
    for rank, name in enumerate(("metrics.jsonl", "metrics-1.jsonl")):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert {line["rank"] for line in lines} == {rank}
        assert [line["values"] for line in lines if "train/loss" in line["values"]] == [{"train/loss": 0.5 + rank}]
        assert [line["step"] for line in lines if "gossamer/step_seconds" in line["values"]] == [1, 2]
        assert len(list((tmp_path / "tb" / f"rank-{rank}").iterdir())) == 1


def test_tools_whose_runs_are_rows_hear_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    class Row:
        def __init__(self, uri: str) -> None:
            opened.append(0)

        def write(self, points: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(destination, "find_spec", lambda name: name)
    monkeypatch.setattr(destination, "WandbWriter", Row)
    train(1, "wandb:x")
    assert not opened
    train(0, "wandb:x")
    assert len(opened) == 1


def test_a_port_in_use_ends_nothing(tmp_path: Path) -> None:
    port = free_port()
    taken = destination.TOOLS["prometheus"].open(str(port), RankPlace(0, 0))
    try:
        said = train(0, f"prometheus:{port}", f"jsonl:{tmp_path}/m.jsonl")
    finally:
        taken.close()
    assert f"prometheus:{port} refuses this worker's metrics (Address already in use)" in said[0]
    assert said[1] == f"4 of 4 events of this worker did not reach prometheus:{port}."
    assert (tmp_path / "m.jsonl").read_text().count("\n") == 4


def test_a_dead_endpoint_ends_nothing() -> None:
    said = train(0, f"otlp:http://127.0.0.1:{free_port()}")
    assert len(said) == 2
    assert said[1].startswith("4 of 4 events of this worker did not reach otlp:")
    assert "Connection refused" in said[0]


def test_each_worker_of_a_machine_has_a_port_of_its_own() -> None:
    port = free_port()
    page = destination.TOOLS["prometheus"].open(str(port), RankPlace(5, 1))
    try:
        page.take([step(7)])
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=10) as answer:
            assert 'gossamer_step{rank="5"} 7.0' in answer.read().decode()
    finally:
        page.close()


def test_the_next_session_ends_the_one_before(tmp_path: Path) -> None:
    for name in ("first", "second"):
        destination.begin([read_destination(f"jsonl:{tmp_path}/{name}")], RankPlace(0, 0))
        events.emit(step(1))
    destination.end()
    assert [(tmp_path / name).read_text().count("\n") for name in ("first", "second")] == [1, 1]
    assert not events.observed()


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
        queue.report_dropped()
    assert tool.taken == happened
    assert tool.closed
    assert not said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd\n  tool"), SystemExit(3)])
def test_whatever_a_tool_raises_is_reported_once_and_counted(error: BaseException) -> None:
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
        queue.report_dropped()
    first, last = said
    assert first.startswith(f"tensorboard:x refuses this worker's metrics ({error.args[-1]}".replace("\n  ", " "))
    assert "Training continues" in first
    assert last == "3 of 4 events of this worker did not reach tensorboard:x."
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
        queue.report_dropped()
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
        queue.report_dropped()
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
    assert said[1].endswith("events of this worker did not reach jsonl:/nfs/x.")


def test_events_that_a_tool_never_takes_are_counted_at_the_end() -> None:
    tool = Stuck()
    with noticed() as said:
        thread = ExportThread(ExportQueue("jsonl:/nfs/x", lambda: tool))
        events.emit(step(1))
        assert tool.entered.wait(SOON_SECONDS)
        thread.ask_to_close()
        thread.wait(time.monotonic())
    tool.let_go.set()
    thread.wait(time.monotonic() + SOON_SECONDS)
    assert said == ["1 of 1 events of this worker did not reach jsonl:/nfs/x."]


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
