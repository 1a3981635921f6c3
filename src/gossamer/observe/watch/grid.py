"""Grid: the steps of all ranks, added up per rank and cell of a window, so that a picture costs what its pixels do.

A store with few rows in the window is read whole. In a larger one that would take seconds; then every rank is asked for
as many rows as there are cells, evenly over its steps, each by one seek: the picture says that it is sampled, and a
window that holds fewer steps is exact again. A sampled step stands for those between it and the one before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.observe.watch.window import TimeWindow, ranks_of

TRAINING = ("compute", "waiting", "data")  # of the training thread: they add up to `seconds`
COMMUNICATION = ("encode", "wire", "decode")  # of the communication thread, hidden behind computing or not
SUMS = ("steps", "seconds", *TRAINING, *COMMUNICATION, "bytes_sent", "bytes_pulled", "skipped")
WHOLE_ROWS = 200_000  # that are read in a quarter of a second
SAMPLES = 25_000  # rows, where it has more

Floats = NDArray[np.float64]

EXACT = """
    SELECT rank, CAST((at - :begin) / :width AS INTEGER) AS cell, max(steps),
    min(seconds / steps), max(seconds / steps), {sums} FROM step
    WHERE rank = :rank AND step BETWEEN :first AND :last AND at >= :begin AND at <= :end GROUP BY cell
"""
SAMPLED = """
    WITH RECURSIVE pick(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM pick WHERE number < :samples - 1)
    SELECT step.rank, CAST((at - :begin) / :width AS INTEGER) AS cell, steps,
    seconds / steps, seconds / steps, {columns}
    FROM pick JOIN step ON step.rank = :rank AND step.step = (
        SELECT min(step) FROM step
        WHERE rank = :rank AND step >= :first + CAST(number * (:last - :first) / (:samples - 1.0) AS INTEGER)
    ) WHERE at >= :begin AND at <= :end
"""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """sums[name]: (ranks, cells), NaN where a rank ended no step; fastest, slowest: (ranks, cells), seconds."""

    window: TimeWindow
    ranks: list[int]
    sums: dict[str, Floats]
    fastest: Floats
    slowest: Floats
    sampled: bool

    def per_step(self, name: str) -> Floats:
        """(ranks, cells): what a step took of it, on average over the cell's steps."""
        return self.sums[name] / self.sums["steps"]

    def total(self, name: str) -> float:
        return float(np.nansum(self.sums[name]))


def read_grid(db: sqlite3.Connection, window: TimeWindow) -> Grid:
    ranks = ranks_of(db)
    edges = {rank: _steps_within(db, rank, window) for rank in ranks}
    sampled = len(ranks) * _rows(db, ranks, edges) > WHOLE_ROWS
    samples = max(2, min(window.cells, SAMPLES // max(1, len(ranks))))
    text = SAMPLED.format(columns=", ".join(SUMS)) if sampled else EXACT.format(sums=", ".join(map(_sum, SUMS)))
    shape = (len(ranks), window.cells)
    grid = Grid(
        window=window,
        ranks=ranks,
        sums={name: np.full(shape, np.nan) for name in SUMS},
        fastest=np.full(shape, np.nan),
        slowest=np.full(shape, np.nan),
        sampled=sampled,
    )
    place = {"begin": window.begin, "end": window.end, "width": window.cell_seconds, "samples": samples}
    for row, rank in enumerate(ranks):
        first, last = edges[rank]
        if last is not None:
            found = db.execute(text, {**place, "rank": rank, "first": first, "last": last})
            _fill(grid, row, list(map(tuple, found)), scaled_to=last - first if sampled else None)
    return grid


def _sum(name: str) -> str:
    return f"sum({name})"


def _fill(grid: Grid, row: int, found: Sequence[tuple[float, ...]], scaled_to: int | None) -> None:
    """found: of one rank, (rank, cell, a row's steps, fastest, slowest, *SUMS). A row that sums more steps than a cell
    holds is spread over the cells that it covers. scaled_to: so many steps stand behind those that were sampled."""
    if not found:
        return
    table = np.array(found, dtype=np.float64)
    cells = np.clip(table[:, 1].astype(int), 0, grid.window.cells - 1)
    sums = table[:, 5:]
    if scaled_to:
        sums = sums * max(1.0, scaled_to / max(1.0, np.nansum(sums[:, 0])))
    for column, name in enumerate(SUMS):
        line = grid.sums[name][row]
        line[cells] = 0
        np.add.at(line, cells, sums[:, column])
    grid.fastest[row, cells] = np.inf
    np.fmin.at(grid.fastest[row], cells, table[:, 3])
    np.fmax.at(grid.slowest[row], cells, table[:, 4])
    covered = table[:, 2] * table[:, 4] / grid.window.cell_seconds if scaled_to is None else _gaps(cells)
    _spread(grid, row, zip(cells, covered, strict=True))


def _gaps(cells: NDArray[np.int64]) -> Floats:
    """How many cells each sampled step stands for: those since the one before, and no more than twice as many as is
    common, so that a rank that was away stays so."""
    gaps = np.diff(cells, prepend=cells[:1]).astype(np.float64)
    common = np.median(gaps[gaps > 0]) if (gaps > 0).any() else 0.0
    return np.where(gaps <= 2 * common, np.maximum(gaps - 1, 0.0), 0.0)


def _spread(grid: Grid, row: int, covered: Iterable[tuple[int, float]]) -> None:
    """covered: cells, and over how many of them reaches the longest row that ends there."""
    empty = np.isnan(grid.sums["steps"][row])
    told_by = np.where(empty, -1, np.arange(grid.window.cells))  # the cell whose rows cover this one
    for cell, count in covered:
        before = told_by[max(0, cell - int(count)) : cell]
        before[before < 0] = cell
    told = told_by[told_by >= 0]
    shares = np.bincount(told, minlength=grid.window.cells)[told]
    for line in (each[row] for each in grid.sums.values()):
        line[told_by >= 0] = line[told] / shares
    for line in (grid.fastest[row], grid.slowest[row]):
        line[told_by >= 0] = line[told]


def _steps_within(db: sqlite3.Connection, rank: int, window: TimeWindow) -> tuple[int, int | None]:
    """A rank's first and last step in the window, by halving: moments grow with steps."""
    ends = "SELECT (SELECT min(step) FROM step WHERE rank = ?1), (SELECT max(step) FROM step WHERE rank = ?1)"
    least, most = db.execute(ends, (rank,)).fetchone()
    if most is None:
        return 0, None
    moment = "SELECT at FROM step WHERE rank = ? AND step = ?"
    begin, end = (db.execute(moment, (rank, step)).fetchone()[0] for step in (least, most))
    return (
        least if begin is None or begin >= window.begin else _first_at(db, rank, least, most, window.begin),
        most if end is None or end <= window.end else _first_at(db, rank, least, most, window.end),
    )


def _first_at(db: sqlite3.Connection, rank: int, least: int, most: int, moment: float) -> int:
    """The least step number at which the rank's next row is not before the moment; `most` where none is."""
    while least < most:
        middle = (least + most) // 2
        asked = "SELECT at FROM step WHERE rank = ? AND step >= ? ORDER BY step LIMIT 1"
        found = db.execute(asked, (rank, middle)).fetchone()
        if found is not None and (found[0] or 0) < moment:
            least = middle + 1
        else:
            most = middle
    return least


def _rows(db: sqlite3.Connection, ranks: list[int], edges: dict[int, tuple[int, int | None]]) -> int:
    """Rows of one rank within the window, for all: counting them all would take as long as reading them."""
    if not ranks:
        return 0
    rank = ranks[len(ranks) // 2]
    asked = "SELECT count(*) FROM step WHERE rank = ? AND step BETWEEN ? AND ?"
    return int(db.execute(asked, (rank, *edges[rank])).fetchone()[0])
