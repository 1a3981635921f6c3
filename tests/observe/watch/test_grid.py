"""Grids keep what steps add up to, however they are cut, merged or sampled."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch import grid as grids
from gossamer.observe.watch.grid import SUMS, TimeWindow, over_time, read_grid, whole

RUN = SyntheticRun(ranks=3, steps=200, fails=None)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = open_store(fill(tmp_path, RUN))
    yield opened
    opened.close()


def total(db: sqlite3.Connection, name: str) -> float:
    return float(db.execute(f"SELECT sum({name}) FROM step").fetchone()[0])


@pytest.mark.parametrize("cells", [1, 7, 64, 1999])
@pytest.mark.parametrize("name", SUMS)
def test_cells_add_up_to_what_the_store_holds(db: sqlite3.Connection, cells: int, name: str) -> None:
    assert read_grid(db, whole(db, cells)).total(name) == pytest.approx(total(db, name))


def test_the_straggler_is_the_row_that_waits_least(db: sqlite3.Connection) -> None:
    waiting = np.nanmean(read_grid(db, whole(db, 20)).per_step("waiting"), axis=1)
    assert int(np.argmin(waiting)) == RUN.straggler


def test_a_merged_row_covers_the_cells_of_all_its_steps(db: sqlite3.Connection) -> None:
    before = read_grid(db, whole(db, 50))
    with db:
        db.execute("CREATE TEMP TABLE merged AS SELECT * FROM step")
        for row in db.execute("SELECT * FROM merged WHERE step % 10 = 0").fetchall():
            summed = {name: 10 * row[name] for name in SUMS if name != "skipped"}
            db.execute(
                "DELETE FROM step WHERE rank = ? AND step > ? AND step < ?",
                (row["rank"], row["step"] - 10, row["step"]),
            )
            insert(db, "step", [{**dict(row), **summed}])
    after = read_grid(db, before.window)
    assert after.total("seconds") == pytest.approx(before.total("seconds"))
    assert np.isnan(after.sums["seconds"]).sum() <= np.isnan(before.sums["seconds"]).sum() + 3
    assert np.nanmax(after.per_step("seconds")) == pytest.approx(RUN.step_seconds)


def test_a_sampled_grid_reports_it_and_is_near(db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = read_grid(db, whole(db, 20))
    monkeypatch.setattr(grids, "WHOLE_ROWS", 100)
    sampled = read_grid(db, whole(db, 20))
    assert (exact.sampled, sampled.sampled) == (False, True)
    assert sampled.total("seconds") == pytest.approx(exact.total("seconds"), rel=0.02)
    assert np.nanmean(sampled.per_step("waiting"), axis=1) == pytest.approx(
        np.nanmean(exact.per_step("waiting"), axis=1)
    )


def sampled_unevenly(db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> grids.Grid:
    """Fewer samples than cells, and ranks whose steps cost differently and began at other moments."""
    with db:
        db.execute("UPDATE step SET compute = compute * (1 + rank), seconds = seconds + rank * compute")
        db.execute("DELETE FROM step WHERE rank = 2 AND step <= 7")
    monkeypatch.setattr(grids, "WHOLE_ROWS", 100)
    monkeypatch.setattr(grids, "SAMPLES", 50 * RUN.ranks)
    return read_grid(db, whole(db, 150))


def jaggedness(line: list[float]) -> float:
    """How far neighboring cells lie apart, beside their mean."""
    known = np.array(line)[8:-8]  # at the ends some ranks have no step yet
    return float(np.nanmax(np.abs(np.diff(known))) / np.nanmean(known))


def test_the_stacked_time_of_a_sampled_run_is_as_even_as_its_steps(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = sampled_unevenly(db, monkeypatch)
    line = over_time(grid)["parts"]["compute"]
    ((exact,),) = db.execute("SELECT avg(mean) FROM (SELECT sum(compute) / sum(steps) AS mean FROM step GROUP BY rank)")
    assert grid.sampled
    assert not np.isnan(np.array(line)[8:-8]).any()
    assert jaggedness(line) < 0.05
    assert np.nanmean(line) == pytest.approx(exact, rel=0.05)


def test_a_sampled_step_that_stands_for_its_own_cell_only_is_seen(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "_gaps", lambda cells: np.zeros(len(cells)))
    line = np.array(over_time(sampled_unevenly(db, monkeypatch))["parts"]["compute"], dtype=float)
    assert np.isnan(line[8:-8]).any() or jaggedness(list(line)) > 0.05


def test_a_rank_that_was_away_stays_away_in_a_sampled_run(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with db:
        db.execute("DELETE FROM step WHERE rank = 1 AND step BETWEEN 60 AND 140")
    monkeypatch.setattr(grids, "WHOLE_ROWS", 100)
    waiting = read_grid(db, whole(db, 100)).per_step("waiting")
    assert np.isnan(waiting[1]).sum() > 30
    assert np.isnan(waiting[0]).sum() < 5


def test_pictures_are_means_over_ranks_whoever_made_more_steps(db: sqlite3.Connection) -> None:
    with db:
        db.execute("UPDATE step SET compute = 1.0 WHERE rank = 0")
        db.execute("UPDATE step SET compute = 0.0 WHERE rank > 0")
        db.execute("DELETE FROM step WHERE rank = 0 AND step % 2 = 0")
    assert over_time(read_grid(db, whole(db, 1)))["parts"]["compute"] == [pytest.approx(1 / RUN.ranks, rel=1e-3)]


def test_a_stretch_holds_its_own_steps_only(db: sqlite3.Connection) -> None:
    begin, end = RUN.at(50) + 0.01, RUN.at(60) + 0.01
    grid = read_grid(db, TimeWindow(begin=begin, end=end, cells=10))
    assert grid.total("steps") == 10 * RUN.ranks


def test_a_stretch_of_a_large_run_is_exact(db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "WHOLE_ROWS", 100)
    grid = read_grid(db, TimeWindow(begin=RUN.at(50) + 0.01, end=RUN.at(60) + 0.01, cells=10))
    assert (grid.sampled, grid.total("steps")) == (False, 30)


def test_nothing_is_a_grid_without_rows(tmp_path: Path) -> None:
    empty = open_store(tmp_path / "empty.sqlite")
    grid = read_grid(empty, whole(empty, 10))
    assert (grid.ranks, grid.total("steps")) == ([], 0)
    empty.close()
