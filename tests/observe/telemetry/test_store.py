"""A run's store: made once, read by others meanwhile, refused where it is newer or none."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, extend, fill

from gossamer.errors import StoreError
from gossamer.observe.telemetry import insert, open_store, store
from gossamer.observe.telemetry.store import LOOKS_BETWEEN, SCHEMA_VERSION, THINNED, ThinnedTable, Thinning, thin

TABLES = {"run", "rank", "step", "metric", "vital", "tensor", "link", "log", "failure", "event", "finding", "source"}


def count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def test_a_new_store_has_every_table_and_its_version(tmp_path: Path) -> None:
    db = open_store(tmp_path / "run.sqlite")
    assert {row["name"] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")} == TABLES
    assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    db.close()


def test_a_reader_sees_what_is_committed_while_the_writer_continues(tmp_path: Path) -> None:
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
    with pytest.raises(StoreError, match="is not a run's store"):
        open_store(tmp_path / "run.sqlite")
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "nowhere.sqlite", readonly=True)
    with pytest.raises(StoreError, match="does not exist"):
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


BY_NAME = {table.name: table for table in THINNED}
ZERO = dict.fromkeys(("seconds", "compute", "encode", "wire", "decode", "waiting", "data", "bytes_pulled"), 0.0)


def steps(db: sqlite3.Connection, rank: int, first: int, last: int) -> None:
    insert(
        db,
        "step",
        (
            {
                "rank": rank,
                "step": step,
                "at": step / 10,
                "steps": 1,
                **ZERO,
                "bytes_sent": 2.0,
                "skipped": step % 5 == 0,
            }
            for step in range(first, last + 1)
        ),
    )


def ends(db: sqlite3.Connection, rank: int) -> list[int]:
    return [row["step"] for row in db.execute("SELECT step FROM step WHERE rank = ? ORDER BY step", (rank,))]


def test_totals_stay_and_the_newest_steps_too(db: sqlite3.Connection) -> None:
    for rank in range(2):
        steps(db, rank, 1, 1000)
    thin(db, BY_NAME["step"], 400)
    row = db.execute("SELECT SUM(steps), SUM(bytes_sent), SUM(skipped), MAX(at) FROM step WHERE rank = 1").fetchone()
    assert tuple(row) == (1000, 2000.0, 200, 100.0)
    kept = ends(db, 0)
    assert len(kept) <= 200
    assert kept[-50:] == list(range(951, 1001))
    assert kept[:3] == [16, 32, 48]  # whole stretches, the same for each rank
    assert kept == ends(db, 1)


def test_what_fits_stays_as_it_came(db: sqlite3.Connection) -> None:
    steps(db, 0, 1, 100)
    thin(db, BY_NAME["step"], 100)
    assert len(ends(db, 0)) == 100


def test_a_run_that_continues_stays_within_its_bound(db: sqlite3.Connection) -> None:
    for begin in range(0, 20_000, 100):
        steps(db, 0, begin + 1, begin + 100)
        thin(db, BY_NAME["step"], 300)
        assert len(ends(db, 0)) <= 300
    (total,) = db.execute("SELECT SUM(steps) FROM step").fetchone()
    assert total == 20_000
    assert max(row["steps"] for row in db.execute("SELECT steps FROM step")) <= 256


@pytest.mark.parametrize("table", [table for table in THINNED if table.along == "at"], ids=lambda table: table.name)
def test_vitals_and_links_of_each_series_keep_their_mean(db: sqlite3.Connection, table: ThinnedTable) -> None:
    value = table.merged[0][0]
    for series in (0, 1):
        key = {name: series if name not in ("name", "machine") else f"s{series}" for name in table.series}
        if table.name == "vital" and series:
            key["rank"] = None  # a machine's
        insert(db, table.name, ({**key, "at": 4096.0 + at, value: at % 2} for at in range(512)))
    thin(db, table, 200)
    assert db.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()[0] <= 200
    old = db.execute(f"SELECT {value} FROM {table.name} WHERE at < 4400").fetchall()
    assert {row[0] for row in old} == {0.5}


def test_a_metric_that_is_not_finite_does_not_hide_its_neighbors(db: sqlite3.Connection) -> None:
    made = (
        {"name": "loss", "rank": 0, "step": step, "at": 0.0, "value": None if step % 2 else 3.0}
        for step in range(1, 401)
    )
    insert(db, "metric", made)
    thin(db, BY_NAME["metric"], 100)
    values = [row["value"] for row in db.execute("SELECT value FROM metric WHERE step < 300")]
    assert values
    assert set(values) == {3.0}


def test_long_lines_go_before_the_newest_hundred_thousand_are_there(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin counts rows alone: a hundred thousand lines of 20,000 letters are two gigabytes."""
    monkeypatch.setattr(store, "MOST_CHARACTERS", 1000)
    thin_now = Thinning(db)
    insert(db, "log", ({"at": number, "text": "x" * 90} for number in range(50)))
    for _ in range(LOOKS_BETWEEN):
        thin_now.look({"log"})
    assert [row["at"] for row in db.execute("SELECT at FROM log ORDER BY id")] == list(range(39, 50))
