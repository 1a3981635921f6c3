"""Curves: metrics of a training loop, as minimum, mean and maximum per pixel, over steps, seconds and bytes."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from math import isfinite

import numpy as np

from gossamer.observe.watch.grid import Grid, clamped

WHOLE_ROWS = 50_000  # of one metric; with too many ranks, only the lowest ones are used

SMALL = 2.0**-64  # a factor that keeps the sum of a cell from overflowing

NAMES = """
    WITH RECURSIVE known(name) AS (
        SELECT min(name) FROM metric UNION ALL
        SELECT (SELECT min(name) FROM metric WHERE name > known.name) FROM known WHERE known.name IS NOT NULL
    ) SELECT name FROM known WHERE name IS NOT NULL
"""
RANKS = """
    WITH RECURSIVE known(rank) AS (
        SELECT min(rank) FROM metric WHERE name = :name UNION ALL
        SELECT (SELECT min(rank) FROM metric WHERE name = :name AND rank > known.rank) FROM known
        WHERE known.rank IS NOT NULL
    ) SELECT rank FROM known WHERE rank IS NOT NULL
"""
ENDS = """
    SELECT (SELECT min(step) FROM metric WHERE name = :name AND rank = :rank),
    (SELECT max(step) FROM metric WHERE name = :name AND rank = :rank)
"""  # of one rank, by one seek each
CELLS = """
    SELECT CAST((step - :first) * :scale AS INTEGER) AS cell, max(step), max(at), min(value), avg(value), max(value),
    avg(value * :small), count(*) - count(value)
    FROM metric WHERE name = :name AND rank BETWEEN :lowest AND :highest AND step BETWEEN :first AND :last GROUP BY cell
"""


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """One point per non-empty cell: the cell's last step and time (unix seconds), and its values.

    not_finite: number of non-finite values of the whole curve; a cell with only such values has None.
    ranks: number of ranks in these values; logged_by: number of ranks that logged the metric.
    """

    name: str
    step: list[int]
    at: list[float]
    least: list[float | None]
    mean: list[float | None]
    greatest: list[float | None]
    not_finite: int
    ranks: int
    logged_by: int


def metric_names(db: sqlite3.Connection) -> list[str]:
    """Names of metrics, losses first, then alphabetically; found by one seek each."""
    names = [row[0] for row in db.execute(NAMES)]
    return sorted(names, key=lambda name: ("loss" not in name.lower(), name.lower() != "loss", name))


def read_curve(db: sqlite3.Connection, name: str, cells: int) -> MetricCurve:
    ranks = [row[0] for row in db.execute(RANKS, {"name": name})]
    if not ranks:
        return MetricCurve(
            name=name, step=[], at=[], least=[], mean=[], greatest=[], not_finite=0, ranks=0, logged_by=0
        )
    ends = {rank: db.execute(ENDS, {"name": name, "rank": rank}).fetchone() for rank in ranks}
    longest = max(ranks, key=lambda rank: ends[rank][1] - ends[rank][0])
    (count,) = db.execute("SELECT count(*) FROM metric WHERE name = ? AND rank = ?", (name, longest)).fetchone()
    shown = ranks[: max(1, WHOLE_ROWS // count)]
    first, last = min(ends[rank][0] for rank in shown), max(ends[rank][1] for rank in shown)
    place = {"lowest": shown[0], "highest": shown[-1], "first": first, "last": last, "name": name}
    scale = clamped(cells) / (last - first + 1)
    found = [tuple(row) for row in db.execute(CELLS, {**place, "scale": scale, "small": SMALL})]
    _, step, at, least, plain, greatest, scaled, lacking = map(list, zip(*found, strict=True))
    mean = [_mean(*cell) for cell in zip(least, plain, greatest, scaled, strict=True)]
    return MetricCurve(
        name=name,
        step=step,
        at=at,
        least=least,
        mean=mean,
        greatest=greatest,
        not_finite=sum(lacking),
        ranks=len(shown),
        logged_by=len(ranks),
    )


def _mean(least: float | None, plain: float | None, greatest: float | None, scaled: float | None) -> float | None:
    """The mean of a cell. plain: from a sum that may overflow; scaled: SMALL times the mean, which does not."""
    if scaled is None or least is None or greatest is None:
        return None
    if plain is not None and isfinite(plain):
        return plain
    return max(least, min(greatest, scaled / SMALL))


def bytes_at(grid: Grid, moments: list[float]) -> list[float]:
    """Total bytes that all ranks had sent by these times, from the bytes per cell."""
    sent = np.nansum(grid.sums["bytes_sent"], axis=0) if grid.ranks else np.zeros(grid.window.cells)
    edges = np.linspace(grid.window.begin, grid.window.end, grid.window.cells + 1)
    return [round(each) for each in np.interp(moments, edges, np.concatenate([[0.0], np.cumsum(sent)]))]
