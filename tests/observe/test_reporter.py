"""The reporter: what rank 0 shows and writes where no launcher does."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_workers
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import events
from gossamer.base.run_files import RunFiles, Stage
from gossamer.errors import AttachError, PeerLost, Stopped
from gossamer.events import Attached, Closed, Event, Logged, Skipped, StepEnded
from gossamer.observe import record as records
from gossamer.observe import reporter
from gossamer.observe.event_log import read_entries
from gossamer.observe.exporters import destination
from gossamer.observe.exporters.points import JsonLinesWriter
from gossamer.observe.rank_record import replay
from gossamer.observe.reporter import ERASE, Reporter, StatusLine, log_destinations, record_path, shows_lines

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


def test_a_rank_that_is_quiet_reports_nothing_and_records(report: Report, said: io.StringIO, tmp_path: Path) -> None:
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


def test_after_a_kill_the_record_is_a_minute_old_and_the_log_next_to_it_a_second(
    report: Report, tmp_path: Path
) -> None:
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


def test_an_older_record_is_not_touched_before_training_continues(report: Report, tmp_path: Path) -> None:
    (tmp_path / "loss.json").write_text("older")
    report(tmp_path / "loss.json").close()
    failed = report(tmp_path / "loss.json")
    happen(attached())
    failed.close()
    assert (tmp_path / "loss.json").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.json"]


def test_a_full_disk_is_reported_once_and_what_was_logged_stays(
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, seconds: int) -> str:
    line = StatusLine(100.0, lambda: stream)
    for tenths in range(10 * seconds):
        moment = 100.0 + tenths / 10
        if line.is_due(moment):
            line.show(f"at {tenths // 10}", moment)
    return stream.getvalue()


def test_elsewhere_a_line_comes_after_two_seconds_and_then_every_ten() -> None:
    assert shown(io.StringIO(), 35) == "".join(f"gossamer: at {second}\n" for second in (2, 12, 22, 32))


def test_a_terminal_s_line_is_overwritten() -> None:
    assert shown(Terminal(), 4) == "".join(f"{ERASE}gossamer: at {second}" for second in (2, 2, 3, 3))


def test_a_sentence_does_not_steer_the_terminal() -> None:
    stream = Terminal()
    StatusLine(0.0, lambda: stream).print_line("step 3 was skipped: layer\x1b[2J")
    assert stream.getvalue() == "gossamer: step 3 was skipped: layer\n"


def test_a_line_that_stays_takes_the_place_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = StatusLine(0.0, lambda: stream)
    line.show("0123456789abcdef", 2.0)
    line.print_line("a sentence")
    line.show("x", 3.0)
    line.leave()
    line.leave()
    expected = f"{ERASE}gossamer: 012345678{ERASE}gossamer: a sentence\n{ERASE}gossamer: x\n"
    assert stream.getvalue() == expected


def test_a_closed_stream_ends_no_training() -> None:
    stream = io.StringIO()
    line = StatusLine(0.0, lambda: stream)
    stream.close()
    line.print_line("x")
    line.show("x", 2.0)
    StatusLine(0.0, lambda: None).show("x", 2.0)  # type: ignore[arg-type, return-value]  # as under pythonw


TRAINING = """
import os, sys
import torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(session):
    for step in range(1, 61):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        session.log(loss=float(step))
        if step == 50 and world.rank == 1 and "fail" in sys.argv:
            raise ValueError("bad data")
if "block" in sys.argv:
    with gossamer.attach(model, optimizer) as session:
        train(session)
else:
    train(gossamer.attach(model, optimizer))
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOSSAMER_RECORD", "GOSSAMER_QUIET", "GOSSAMER_LOG_TO"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("quiet", "record", "world", "lines"),
    [
        ("", None, 2, True), ("", "r.json", 2, True), ("", False, 2, False), ("1", None, 2, False),
        ("", None, 1, False), ("", "r.json", 1, False), ("0", None, 1, True), ("0", False, 1, False),
    ],
)  # fmt: skip
def test_lines_are_for_worlds_that_were_not_asked_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch, quiet: str, record: Any, world: int, lines: bool
) -> None:
    monkeypatch.setenv("GOSSAMER_QUIET", quiet)
    assert shows_lines(record, world) is lines


def test_the_variable_beats_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_path(None) is record_path(False) is None
    assert record_path("r.json") == Path("r.json").absolute()
    monkeypatch.setenv("GOSSAMER_RECORD", "other.json")
    assert record_path("r.json") == record_path(False) == Path("other.json").absolute()
    monkeypatch.setenv("GOSSAMER_RECORD", "")
    assert record_path("r.json") is None


def recorded_session(record: Any) -> gossamer.Session:
    model = nn.Linear(3, 2)
    return gossamer.attach(model, SGD(model.parameters(), 0.1), record=record)


def test_a_place_that_cannot_be_written_is_refused_at_attach(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AttachError, match=r'Write another path, such as record="record.json"'):
        recorded_session(tmp_path / "file" / "record.json")
    with pytest.raises(AttachError, match=r'record=True is not a file name.*Write record="record.json"'):
        recorded_session(True)


def test_alone_a_script_that_asks_for_it_is_recorded_and_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with recorded_session(tmp_path / "loss.json") as session:
        assert f"record: {tmp_path / 'loss.json'}" in repr(session)
        session.model(torch.ones(1, 3)).sum().backward()
        session.optimizer.step()
        session.log(loss=1.0)
    assert json.loads((tmp_path / "loss.json").read_text())["final"] == {"loss": 1.0}
    assert capfd.readouterr() == ("", "")


def test_a_session_under_the_launcher_names_the_launcher_s_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_RUN_DIRECTORY", str(tmp_path / "logs" / ".run-x"))
    with recorded_session(None) as session:
        assert f"record: {tmp_path / 'logs' / 'record.json'}" in repr(session)


@pytest.mark.parametrize("attached", [False, True])
def test_a_process_that_a_launched_script_started_is_recorded_unless_its_worker_is(
    attached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script that trains in a process of torch.multiprocessing: its worker has no session."""
    files = RunFiles(tmp_path)
    files.report_start(0, 1, os.getpid() + 1)
    if attached:
        files.mark(Stage.ATTACHED, 0, 1)
    for name, value in {
        "GOSSAMER_RUN_DIRECTORY": str(tmp_path),
        "RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    subscribe, subscribed = events.subscribe, []
    monkeypatch.setattr(events, "subscribe", lambda *a, **b: subscribed.append(subscribe(*a, **b)) or subscribed[-1])
    with recorded_session(None) as session:
        session.model(torch.ones(1, 3)).sum().backward()
        session.optimizer.step()
        session.log(loss=1.0)
    for end in (*at_exit, *subscribed):
        end()
    assert files.has_reached(Stage.JOINED, 0) != attached
    assert [(each.steps, each.complete) for each in records.read_ranks(tmp_path)] == [(1, True)] * (not attached)


def asked(directory: Path) -> dict[str, str]:
    return {"GOSSAMER_RECORD": str(directory / "loss.json"), "GOSSAMER_QUIET": ""}


@pytest.mark.processes
@pytest.mark.parametrize("form", ["block", "open"])
def test_without_our_launcher_rank_0_tells_and_records(tmp_path: Path, form: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    first, second = run_workers([str(script), form], 2, extra=asked(tmp_path))
    assert (first.returncode, second.returncode) == (0, 0), first.stdout
    assert first.stdout.count("gossamer: finished after 60 steps") == 1
    assert "gossamer" not in second.stdout
    record = json.loads((tmp_path / "loss.json").read_text())
    assert (record["ended"], record["workers"], len(record["metrics"]["loss"])) == ("finished", 2, 60)


@pytest.mark.processes
def test_where_another_rank_fails_rank_0_has_what_was_logged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    first, _ = run_workers([str(script), "block", "fail"], 2, extra=asked(tmp_path))
    assert "gossamer: failed after" in first.stdout
    record = json.loads((tmp_path / "loss.json").read_text())
    assert (record["ended"], len(record["metrics"]["loss"])) == ("failed", 50)


def test_where_numbers_go_is_the_arguments_or_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(each) for each in log_destinations(["jsonl:a", "jsonl:b"])] == ["jsonl:a", "jsonl:b"]
    assert [str(each) for each in log_destinations("jsonl:a")] == ["jsonl:a"]
    monkeypatch.setenv("GOSSAMER_LOG_TO", "jsonl:c,prometheus:9400")
    assert [str(each) for each in log_destinations(["jsonl:a"])] == ["jsonl:c", "prometheus:9400"]
    monkeypatch.setenv("GOSSAMER_LOG_TO", "")
    assert log_destinations(["jsonl:a"]) == ()


def test_an_invalid_destination_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match="log_to: 'runs' is not a destination"):
        gossamer.attach(model, SGD(model.parameters(), lr=0.1), log_to=["runs"])
    monkeypatch.setenv("GOSSAMER_LOG_TO", "runs")
    with pytest.raises(AttachError, match="GOSSAMER_LOG_TO: 'runs' is not a destination"):
        gossamer.attach(model, SGD(model.parameters(), lr=0.1))


def test_an_attached_session_is_exported_until_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with gossamer.attach(model, optimizer, log_to=[f"jsonl:{file}"]) as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        session.log(loss=0.5)
    values = [json.loads(line)["values"] for line in file.read_text().splitlines()]
    assert values[0] == {"gossamer/workers": 1}
    assert values[1]["gossamer/step_seconds"] > 0
    assert values[2] == {"loss": 0.5}


def linear() -> tuple[nn.Linear, SGD]:
    model = nn.Linear(2, 2)
    return model, SGD(model.parameters(), lr=0.1)


def train(session: gossamer.Session) -> None:
    session.model(torch.ones(1, 2)).sum().backward()
    session.optimizer.step()


def curves(file: Path) -> set[str]:
    return {name for line in file.read_text().splitlines() for name in json.loads(line)["values"]}


@pytest.mark.parametrize("named", ["by the first", "by both"])
def test_a_second_session_before_the_first_step_leaves_record_and_metrics_of_the_first(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    class Writer(JsonLinesWriter):
        def __init__(self, path: Path, rank: int) -> None:
            opened.append(path)
            super().__init__(path, rank)

    monkeypatch.setattr(destination, "JsonLinesWriter", Writer)
    record, file = tmp_path / "record.json", tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {"record": record, "log_to": [f"jsonl:{file}"]}
    with (
        gossamer.attach(*linear(), **options) as generator,
        gossamer.attach(*linear(), **(options if named == "by both" else {})) as discriminator,
    ):
        assert generator.status.record == discriminator.status.record == str(record)
        for session in (generator, discriminator):
            train(session)
        generator.log(loss=0.5)
    assert curves(file) >= {"gossamer/step_seconds", "loss"}
    assert opened == [file]
    assert json.loads(record.read_text())["metrics"]["loss"]


def test_a_report_of_two_sessions_lasts_until_both_are_closed(tmp_path: Path) -> None:
    record, file = tmp_path / "record.json", tmp_path / "metrics.jsonl"
    generator = gossamer.attach(*linear(), record=record, log_to=[f"jsonl:{file}"])
    discriminator = gossamer.attach(*linear())
    for session in (generator, discriminator):
        train(session)
    discriminator.close()
    generator.log(loss=0.5)
    generator.close()
    assert "loss" in curves(file)
    assert json.loads(record.read_text())["sessions"] == 2
    assert json.loads(record.read_text())["metrics"]["loss"]
    assert not events.observed()


def test_lines_of_two_sessions_end_with_the_last_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOSSAMER_QUIET", "0")
    generator, discriminator = gossamer.attach(*linear()), gossamer.attach(*linear())
    for session in (generator, discriminator):
        train(session)
    discriminator.close()
    train(generator)
    assert "finished" not in capsys.readouterr().err
    generator.close()
    assert "finished after 3 steps" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 1])
def test_a_session_that_was_never_closed_does_not_extend_the_report_of_a_later_one(tmp_path: Path, steps: int) -> None:
    record, file = tmp_path / "record.json", tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {"record": record, "log_to": [f"jsonl:{file}"]}
    abandoned = gossamer.attach(*linear(), **options)
    for _ in range(steps):
        train(abandoned)
    with gossamer.attach(*linear(), **options) as session:
        train(session)
    assert json.loads(record.read_text())["steps"] == 1
    assert not events.observed()
    abandoned.close()


def test_a_session_after_steps_of_another_ends_the_report_of_that_one(tmp_path: Path) -> None:
    record, file = tmp_path / "record.json", tmp_path / "metrics.jsonl"
    first = gossamer.attach(*linear(), record=record, log_to=[f"jsonl:{file}"])
    train(first)
    first.log(loss=0.5)
    with gossamer.attach(*linear()) as second:
        second.log(other=1.0)
    first.close()
    assert curves(file) >= {"gossamer/step_seconds", "loss"}
    assert "other" not in curves(file) | set(json.loads(record.read_text())["metrics"])


def test_every_module_attaches_by_the_public_name_so_that_its_sessions_are_reported() -> None:
    root = Path(gossamer.__file__).parent
    sources = [path for path in root.rglob("*.py") if path != root / "__init__.py"]
    found = [str(path) for path in sources if "from gossamer.train.session.attach import" in path.read_text()]
    assert not found
