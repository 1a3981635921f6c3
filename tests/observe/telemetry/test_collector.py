"""The launcher's collector: all is there at the end, an old store is kept aside, a disk that is full ends no run."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from support.processes import eventually

from gossamer.observe.telemetry import Collector, open_store
from gossamer.observe.telemetry.collector import set_aside
from gossamer.observe.telemetry.rows import NewRows


def facts(path: Path) -> dict[str, object]:
    db = open_store(path, readonly=True)
    found = {row["key"]: json.loads(row["value"]) for row in db.execute("SELECT key, value FROM run")}
    db.close()
    return found


def run(logs: Path, script: str, note: list[str]) -> None:
    private = logs / f".run-{script}"
    private.mkdir()
    with Collector(logs, private, {"script": script, "workers": 2}, note.append) as collector:
        collector.notes_recorded_by(note.append)(f"{script} begins")
        (private / "output-0-0.txt").write_text("no newline at its end")
        collector.ended("finished")


def test_the_end_of_a_run_has_all_that_was_reported(tmp_path: Path) -> None:
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
    assert "Training and its record continue" in notes[0]


def texts(path: Path) -> list[str]:
    db = open_store(path, readonly=True)
    found = [row["text"] for row in db.execute("SELECT text FROM log ORDER BY id")]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    return found


def test_a_store_that_takes_nothing_for_a_while_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came meanwhile is in the run's files, and is read once; the launcher says one sentence."""
    monkeypatch.setattr("gossamer.observe.telemetry.collector.LOOK_SECONDS", 0.01)
    notes: list[str] = []
    full = threading.Event()
    write = NewRows.write

    def on_a_full_disk(rows: NewRows, db: sqlite3.Connection) -> None:
        write(rows, db)
        if full.is_set():
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(NewRows, "write", on_a_full_disk)
    with Collector(tmp_path, tmp_path, {}, notes.append) as collector:
        collector.report("note", text="before")
        assert eventually(lambda: "before" in texts(tmp_path / "run.sqlite"))
        full.set()
        collector.report("note", text="meanwhile")
        assert eventually(lambda: len(notes) == 1)
        assert texts(tmp_path / "run.sqlite") == ["before"]
        full.clear()
        assert eventually(lambda: "meanwhile" in texts(tmp_path / "run.sqlite"))
        full.set()
        collector.report("note", text="at the end")
        assert eventually(lambda: collector._ingest is None)
        full.clear()
    assert texts(tmp_path / "run.sqlite") == ["before", "meanwhile", "at the end"]
    (note,) = notes
    assert "disk is full" in note
    assert list(tmp_path.glob("run-*.sqlite")) == []  # and none was set aside for another


def test_entries_that_no_version_writes_end_no_run(tmp_path: Path) -> None:
    notes: list[str] = []
    with Collector(tmp_path, tmp_path, {}, notes.append) as collector:
        (tmp_path / "events-0.jsonl").write_text('{"kind": "attached", "moment": "noon", "at": 1}\n')
        collector.ended("finished")
    assert len(notes) == 1


def test_a_store_that_is_set_aside_keeps_the_rows_of_its_write_ahead_log(tmp_path: Path) -> None:
    """As after a launcher that was killed: the newest rows are only in the log beside the file."""
    store = tmp_path / "run.sqlite"
    db = open_store(store)
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.executemany("INSERT INTO metric VALUES(?,?,?,0,?)", [("loss", step, 1.0, 0.5) for step in range(3)])
    db.commit()
    for suffix in ("", "-wal", "-shm"):  # a copy of what a kill leaves: closing would move the rows
        killed = tmp_path / "killed"
        killed.mkdir(exist_ok=True)
        (killed / f"run.sqlite{suffix}").write_bytes((tmp_path / f"run.sqlite{suffix}").read_bytes())
    db.close()
    kept = set_aside(killed / "run.sqlite")
    assert kept is not None
    assert not list(killed.glob("run.sqlite*"))
    again = open_store(kept, readonly=True)
    assert again.execute("SELECT count(*) FROM metric").fetchone()[0] == 3
    again.close()
