"""The launcher's collector: all is there at the end, an old store is kept aside, a disk that is full ends no run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.telemetry import Collector, open_store
from gossamer.telemetry.collector import set_aside


def facts(path: Path) -> dict[str, object]:
    db = open_store(path, readonly=True)
    found = {row["key"]: json.loads(row["value"]) for row in db.execute("SELECT key, value FROM run")}
    db.close()
    return found


def run(logs: Path, script: str, note: list[str]) -> None:
    private = logs / f".run-{script}"
    private.mkdir()
    with Collector(logs, private, {"script": script, "workers": 2}, note.append) as collector:
        collector.heard(note.append)(f"{script} begins")
        (private / "output-0-0.txt").write_text("no newline at its end")
        collector.ended("finished")


def test_the_end_of_a_run_has_all_that_was_told(tmp_path: Path) -> None:
    notes: list[str] = []
    run(tmp_path, "train.py", notes)
    assert notes == ["train.py begins"]
    told = facts(tmp_path / "run.sqlite")
    assert (told["script"], told["workers"], told["how"]) == ("train.py", 2, "finished")
    assert told["ended"] >= told["started"]  # type: ignore[operator]
    db = open_store(tmp_path / "run.sqlite", readonly=True)
    lines = {(row["stream"], row["text"]) for row in db.execute("SELECT stream, text FROM log")}
    db.close()
    assert lines == {("launcher", "train.py begins"), ("stdout", "no newline at its end")}


def test_a_run_that_an_error_ends_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Collector(tmp_path, tmp_path, {}, pytest.fail):
        raise ZeroDivisionError
    assert facts(tmp_path / "run.sqlite")["how"] == "failed"


def test_a_second_run_with_the_same_logs_sets_the_first_ones_store_aside(tmp_path: Path) -> None:
    run(tmp_path, "first.py", [])
    run(tmp_path, "second.py", [])
    (kept,) = tmp_path.glob("run-*.sqlite")
    assert facts(kept)["script"] == "first.py"
    assert facts(tmp_path / "run.sqlite")["script"] == "second.py"
    assert set_aside(tmp_path / "nothing.sqlite") is None


def test_a_store_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    notes: list[str] = []
    logs = tmp_path / "logs"
    (logs / "run.sqlite").mkdir(parents=True)
    (logs / "run.sqlite" / "in the way").touch()
    with Collector(logs, tmp_path, {}, notes.append) as collector:
        collector.ended("finished")
    assert notes == []  # a folder is set aside, too
    (logs / "run.sqlite").unlink()
    with Collector(logs / "nowhere", tmp_path, {}, notes.append):
        pass
    assert len(notes) == 1
    assert "Training and its record go on" in notes[0]
