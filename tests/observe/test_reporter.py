"""The reporter: what rank 0 shows and writes where no launcher does."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer import events
from gossamer.errors import PeerLost, Stopped
from gossamer.events import Attached, Closed, Event, Logged, Skipped, StepEnded
from gossamer.observe import record as records
from gossamer.observe import reporter
from gossamer.observe.event_log import read_entries
from gossamer.observe.rank_record import replay
from gossamer.observe.reporter import Reporter

Report = Callable[..., Reporter]


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def report(said: io.StringIO) -> Iterator[Report]:
    made: list[Reporter] = []

    def make(record: Path | None = None, lines: bool = True) -> Reporter:
        made.append(Reporter(lines=lines, record=record, stream=lambda: said))
        return made[-1]

    yield make
    for each in made:
        each.close("finished")
    assert not events.observed()


def attached(moment: float = 100.0) -> Attached:
    return Attached(
        moment=moment, recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=2
    )


def closed(ended: events.Ended, steps: int = 50) -> Closed:
    return Closed(steps=steps, digest="d", residual_bytes=0, bucket_bytes=0, ended=ended)


def training(steps: int, began: float = 100.0, step_seconds: float = 0.5) -> Iterator[Event]:
    yield attached(began)
    for step in range(1, steps + 1):
        moment = began + step_seconds * step
        yield StepEnded(moment=moment, step=step, seconds=step_seconds, waiting_seconds=0.1, bytes_sent=4e6)
        yield Logged(moment=moment, step=step, values={"loss": 1 / step})


def happen(*happened: Event) -> None:
    for event in happened:
        events.emit(event)


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_a_line_every_ten_seconds_and_one_at_the_end(report: Report, said: io.StringIO) -> None:
    report()
    happen(*training(50), closed("finished"))
    first, *between, last = said.getvalue().splitlines()
    assert first == "gossamer: step 4 · 2.00 steps/s · loss 0.333 · 4.0 MB/step · 20 % waiting · 2 s"
    assert len(between) == 2
    assert last == "gossamer: finished after 50 steps in 25 s · 2.00 steps/s · loss 0.0200 · 4.0 MB/step · 20 % waiting"


def test_who_is_quiet_says_nothing_and_records(report: Report, said: io.StringIO, tmp_path: Path) -> None:
    report(tmp_path / "new" / "loss.json", lines=False)
    happen(*training(50), closed("finished"))
    assert said.getvalue() == ""
    record = read(tmp_path / "new" / "loss.json")
    assert (record["ended"], record["steps"], len(record["metrics"]["loss"])) == ("finished", 50, 50)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["loss.json"]


@pytest.mark.parametrize(
    ("kind", "ended"),
    [(PeerLost, "failed"), (KeyboardInterrupt, "interrupted"), (Stopped, "finished"), (None, "finished")],
)
def test_how_it_ended_is_said_by_what_left_the_block_or_the_interpreter(
    report: Report, said: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException] | None, ended: events.Ended,
) -> None:  # fmt: skip
    report(tmp_path / "block.json")
    happen(*training(3), closed(events.ended_by(kind)))
    at_exit = report(tmp_path / "exit.json")
    monkeypatch.setattr(sys, "last_type", kind, raising=False)
    happen(*training(3))
    at_exit.close()
    assert [read(tmp_path / f"{name}.json")["ended"] for name in ("block", "exit")] == [ended, ended]
    assert said.getvalue().count(f"gossamer: {ended} after 3 steps") == 2


def test_after_a_kill_the_record_is_a_minute_old_and_the_log_beside_it_a_second(report: Report, tmp_path: Path) -> None:
    report(tmp_path / "loss.json")
    seen: list[int] = []
    for event in training(2000, step_seconds=0.3):
        happen(event)
        if isinstance(event, Logged) and event.step % 100 == 0:
            seen.append(read(tmp_path / "loss.json")["steps"])
            logged = replay(read_entries(tmp_path / "loss.events.jsonl"))
            assert logged is not None
            assert logged.steps > event.step - 5
    assert seen == sorted(seen)
    assert seen[0] >= 40
    assert seen[-1] >= 1800
    assert read(tmp_path / "loss.json")["ended"] == "interrupted"


def test_rewriting_costs_a_small_share_of_the_time(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes two virtual seconds."""
    clock, written = [0.0], []

    def write(path: Path, record: records.Record) -> None:
        clock[0] += 2.0
        written.append(path)

    monkeypatch.setattr(reporter.records, "write", write)
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: clock[0])
    report(tmp_path / "loss.json")
    happen(*training(5000, step_seconds=1.0))
    assert 2 * len(written) <= 0.01 * 5000


def test_an_older_record_is_not_touched_before_training_goes_on(report: Report, tmp_path: Path) -> None:
    (tmp_path / "loss.json").write_text("older")
    report(tmp_path / "loss.json").close()
    failed = report(tmp_path / "loss.json")
    happen(attached())
    failed.close()
    assert (tmp_path / "loss.json").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.json"]


def test_a_full_disk_is_said_once_and_what_was_logged_stays(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, record: records.Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reporter.records, "write", full)
    report(tmp_path / "loss.json")
    with caplog.at_level(logging.WARNING, "gossamer"):
        happen(*training(100), closed("finished", 100))
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert f"gossamer record {tmp_path / 'loss.events.jsonl'}" in message
    logged = replay(read_entries(tmp_path / "loss.events.jsonl"))
    assert logged is not None
    assert (logged.steps, logged.complete) == (100, True)


def test_notices_are_logged_as_without_it_and_skipped_steps_said(
    report: Report, said: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    report()
    with caplog.at_level(logging.WARNING, "gossamer"):
        happen(attached())
        events.notice("something odd")
        happen(Skipped(step=3, rank=1, tensor="w"))
    assert caplog.messages == ["something odd"]
    assert "something odd" not in said.getvalue()
    assert "Step 3 was skipped on every worker" in said.getvalue()


def test_one_session_is_reported_at_a_time_and_none_that_another_listens_to(tmp_path: Path) -> None:
    def count() -> int:
        return len(events._listeners)

    reporter.begin(lines=True, record=None)
    reporter.begin(lines=True, record=tmp_path / "a.json")
    assert count() == 1
    reporter.begin(lines=False, record=None)
    assert count() == 0
    end = events.subscribe(lambda event: None)
    reporter.begin(lines=True, record=None)
    assert count() == 1
    end()
