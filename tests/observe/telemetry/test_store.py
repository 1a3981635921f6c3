"""A run's store: made once, read by others meanwhile, refused where it is newer or none."""

import sqlite3
from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, extend, fill

from gossamer.errors import StoreError
from gossamer.observe.telemetry import insert, open_store, store
from gossamer.observe.telemetry.schema import SCHEMA_VERSION

TABLES = {"run", "rank", "step", "metric", "vital", "tensor", "link", "log", "failure", "event", "finding", "source"}


def count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def test_a_new_store_has_every_table_and_its_version(tmp_path: Path) -> None:
    db = open_store(tmp_path / "run.sqlite")
    assert {row["name"] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")} == TABLES
    assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    db.close()


def test_a_reader_sees_what_is_committed_while_the_writer_goes_on(tmp_path: Path) -> None:
    path = fill(tmp_path, run := SyntheticRun(ranks=2, steps=10))
    writer, reader = open_store(path), open_store(path, readonly=True)
    writer.execute("DELETE FROM step WHERE step = 1")
    assert count(reader, "step") == 20  # not committed: what the reader sees is whole
    writer.rollback()
    extend(writer, run, 11, 12)
    assert count(reader, "step") == 24
    writer.close()
    reader.close()


def test_who_only_reads_cannot_write(tmp_path: Path) -> None:
    reader = open_store(fill(tmp_path, SyntheticRun(steps=1)), readonly=True)
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("DELETE FROM step")
    reader.close()


def test_a_row_replaces_that_of_the_same_key(tmp_path: Path) -> None:
    db = open_store(tmp_path / "run.sqlite")
    for value in (1.0, 2.0):
        insert(db, "metric", [{"name": "loss", "rank": 0, "step": 3, "at": 0.0, "value": value}])
    insert(db, "metric", iter(()))
    assert [row["value"] for row in db.execute("SELECT value FROM metric")] == [2.0]
    db.close()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    db = open_store(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    for readonly in (False, True):
        with pytest.raises(StoreError, match="newer version of Gossamer"):
            open_store(path, readonly=readonly)


def test_what_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"something else, long enough to have a header" * 40)
    with pytest.raises(StoreError, match="is no store"):
        open_store(tmp_path / "run.sqlite")
    with pytest.raises(StoreError, match="not there"):
        open_store(tmp_path / "nowhere.sqlite", readonly=True)
    with pytest.raises(StoreError, match="not there"):
        open_store(tmp_path / "nowhere" / "run.sqlite")


def test_the_made_up_run_has_something_in_every_table(tmp_path: Path) -> None:
    db = open_store(fill(tmp_path, SyntheticRun()), readonly=True)
    assert {table for table in TABLES if not count(db, table)} == {"source"}
    slow = db.execute("SELECT rank FROM step GROUP BY rank ORDER BY SUM(compute) DESC").fetchone()
    assert slow["rank"] == 1
    db.close()


def test_a_store_on_a_full_disk_is_not_said_to_be_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(db: sqlite3.Connection) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_create", full)
    with pytest.raises(StoreError, match=r"cannot be used as a run's store \(database or disk is full\)\.$"):
        open_store(tmp_path / "run.sqlite")
