"""Curves keep the least and the greatest value of every pixel, and the mean of all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch import curves
from gossamer.observe.watch.curves import bytes_at, metric_names, read_curve
from gossamer.observe.watch.grid import read_grid, whole

RUN = SyntheticRun(ranks=2, steps=300, fails=None)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = open_store(fill(tmp_path, RUN))
    yield opened
    opened.close()


@pytest.mark.parametrize("cells", [1, 9, 50])
def test_a_spike_of_one_step_is_seen_at_any_width(db: sqlite3.Connection, cells: int) -> None:
    with db:
        insert(db, "metric", [{"name": "loss", "step": 211, "at": RUN.at(211), "rank": 0, "value": 99.0}])
    curve = read_curve(db, "loss", cells)
    assert len(curve.mean) <= cells
    assert max(value for value in curve.greatest if value is not None) == 99.0
    assert min(value for value in curve.least if value is not None) < 0.6


def test_a_value_that_is_not_finite_is_counted_and_a_gap(db: sqlite3.Connection) -> None:
    curve = read_curve(db, "loss", 2000)
    assert curve.not_finite == RUN.ranks
    assert curve.mean[curve.step.index(7)] is None
    assert read_curve(db, "loss", 1).mean[0] is not None


def test_losses_come_first(db: sqlite3.Connection) -> None:
    with db:
        insert(db, "metric", [{"name": "accuracy", "step": 1, "at": 0.0, "rank": 0, "value": 0.1}])
    assert metric_names(db) == ["loss", "validation_loss", "accuracy"]


def test_where_ranks_are_many_the_lowest_speak_for_all(db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "WHOLE_ROWS", 10)
    curve = read_curve(db, "loss", 50)
    assert (curve.ranks, curve.logged_by) == (1, 2)


def test_a_curve_continues_after_the_lowest_rank_was_lost(db: sqlite3.Connection) -> None:
    with db:
        db.execute("DELETE FROM metric WHERE rank = 0 AND step > 100")
    for cells in (1, 50, 2000):
        curve = read_curve(db, "loss", cells)
        assert curve.step[-1] == RUN.steps
        assert (curve.ranks, curve.logged_by) == (2, 2)


def test_a_metric_that_nobody_logged_has_no_points(db: sqlite3.Connection) -> None:
    assert read_curve(db, "never", 50).step == []


def test_bytes_grow_to_all_that_was_sent(db: sqlite3.Connection) -> None:
    grid = read_grid(db, whole(db, 40))
    sent = bytes_at(grid, [RUN.at(1), RUN.at(150), RUN.at(300) + 1])
    assert sent == sorted(sent)
    assert sent[-1] == 264_000 * RUN.ranks * RUN.steps


@pytest.mark.parametrize("value", [1e308, -1.7e308])
def test_a_cell_of_huge_values_has_a_mean(db: sqlite3.Connection, value: float) -> None:
    with db:
        rows = [{"name": "huge", "step": step, "at": RUN.at(step), "rank": 0, "value": value} for step in range(1, 200)]
        insert(db, "metric", rows)
    curve = read_curve(db, "huge", 3)
    assert curve.mean == curve.least == curve.greatest == [value] * 3
