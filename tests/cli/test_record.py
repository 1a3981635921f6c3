"""`gossamer record`: a record again, and of what a killed run left."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gossamer.cli.main import gossamer
from gossamer.events import Attached, Logged, StepEnded
from gossamer.observe.event_log import EventLog, LineFile, event_log_path
from gossamer.observe.saved_record import Record


def train(file: Path, rank: int, steps: int) -> None:
    """Until a kill: there is no word about the end, and the last line is torn."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = LineFile(file, pytest.fail)
    log = EventLog(lines.append)
    shape = {"layouts": (), "parameters": 3, "buffer_bytes": 0, "control_bytes": 0}
    log(Attached(moment=0.0, recipe="Dense()", rank=rank, world=2, **shape))  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        log(StepEnded(moment=2.0 * step, step=step, seconds=2.0, bytes_sent=8.0))
        log(Logged(moment=2.0 * step, step=step, values={"loss": 1 / step}))
    lines.close()
    with file.open("a") as torn:
        torn.write('{"kind": "st')


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(gossamer, ["record", *map(str, arguments)])


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_a_run_that_was_killed_with_its_launcher_has_its_record_yet(tmp_path: Path) -> None:
    for place, steps in ((".run-a", 90), (".run-b", 50)):
        for rank in range(2):
            train(event_log_path(tmp_path / place, rank), rank, steps)
    os.utime(tmp_path / ".run-a", (0, 0))
    done = show(tmp_path)
    assert done.exit_code == 0, done.output
    assert (
        "steps                     50 in 100 s" in done.output or "steps                     50 in 1 min" in done.output
    )
    record = read(tmp_path / "record.json")
    assert (record["ended"], record["workers"], len(record["metrics"]["loss"])) == ("interrupted", 2, 50)


@pytest.mark.parametrize(("steps", "written", "shown"), [(50, 1, 50), (50, 10**10, 3), (0, 1, 3)])
def test_a_killed_run_is_shown_rather_than_an_earlier_one_in_its_folder(
    steps: int, written: int, shown: int, tmp_path: Path
) -> None:
    """An older record is of an earlier run, unless the later one has not trained."""
    train(tmp_path / "first.events.jsonl", 0, 3)
    assert show(tmp_path / "first.events.jsonl").exit_code == 0
    (tmp_path / "first.json").rename(tmp_path / "record.json")
    os.utime(tmp_path / "record.json", (written, written))
    train(event_log_path(tmp_path / ".run-a", 0), 0, steps)
    assert len(Record.load(tmp_path)["metrics"]["loss"]) == shown
    assert show(tmp_path).exit_code == 0
    assert len(read(tmp_path / "record.json")["metrics"]["loss"]) == shown


def test_an_event_log_next_to_a_record_is_newer(tmp_path: Path) -> None:
    (tmp_path / "loss.json").write_text("{}")
    train(tmp_path / "loss.events.jsonl", 0, 20)
    assert show(tmp_path / "loss.events.jsonl").exit_code == 0
    assert read(tmp_path / "loss.json")["steps"] == 20


def test_a_record_is_shown_again_and_drawn(tmp_path: Path) -> None:
    train(tmp_path / "loss.events.jsonl", 0, 20)
    first = show(tmp_path / "loss.events.jsonl", "--json", tmp_path / "record.json")
    before = (tmp_path / "record.json").read_text()
    for path in (tmp_path, tmp_path / "record.json"):
        again = show(path, "--plot", tmp_path / "curve.png")
        assert set(first.output.splitlines()) < set(again.output.splitlines())
    assert (tmp_path / "curve.png").exists()
    assert (tmp_path / "record.json").read_text() == before
    assert not (tmp_path / "loss.json").exists()


def test_nothing_to_show_is_reported_with_what_to_name(tmp_path: Path) -> None:
    assert "Name a run's folder" in show(tmp_path).output
    (tmp_path / "notes.txt").write_text("no JSON")
    assert "is not a record" in show(tmp_path / "notes.txt").output


def test_a_file_that_is_no_record_of_a_run_is_reported(tmp_path: Path) -> None:
    """`gossamer study` stores such files."""
    stored = {"recipe": "Dense()", "steps": 5, "metrics": {}, "compute_seconds_per_step": 0.1, "memory_bytes": {}}
    (tmp_path / "study.json").write_text(json.dumps({**stored, "seconds_per_step": {"median": 0.1}}))
    done = show(tmp_path / "study.json")
    assert "is not the record of a run: it has no 'waiting_seconds_per_step'" in done.output
    assert Record.load(tmp_path / "study.json")._repr_html_() is None


@pytest.mark.parametrize(("field", "value"), [("seconds", float("inf")), ("final", None), ("metrics", None)])
def test_a_record_with_a_field_of_another_type_is_reported(field: str, value: object, tmp_path: Path) -> None:
    train(tmp_path / "loss.events.jsonl", 0, 20)
    assert show(tmp_path / "loss.events.jsonl").exit_code == 0
    (tmp_path / "loss.json").write_text(json.dumps({**read(tmp_path / "loss.json"), field: value}))
    done = show(tmp_path / "loss.json", "--plot", tmp_path / "curve.png")
    assert isinstance(done.exception, SystemExit)
    assert "loss.json is not the record of a run" in done.output


def test_a_record_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "record.json").mkdir()
    assert "record.json cannot be read: Is a directory. Name a run's folder" in show(tmp_path).output


def test_a_record_is_shown_even_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, record: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("gossamer.cli.record.write", refuse)
    train(tmp_path / "loss.events.jsonl", 0, 20)
    done = show(tmp_path / "loss.events.jsonl")
    assert done.exit_code == 1
    assert "steps                     20" in done.output
    assert "loss.json (Permission denied). Name another file: --json FILE" in done.output
