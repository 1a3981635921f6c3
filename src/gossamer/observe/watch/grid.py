"""Grid: steps of all ranks, summed per rank and cell of a window, so that a picture costs as much as its pixels.

A store with few rows in the window is read completely. In a larger one that would take seconds; then each rank's rows
are sampled, one per cell, evenly over its steps, by one seek each. The picture is marked as sampled, and a window with
fewer steps is exact again. A sampled step represents all steps since the previous sample.

Grids are cached, and become the columns and cells that the page draws (`heat`, `over_time`).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.observe.telemetry import STORE_FILE
from gossamer.observe.watch.runs import WatchedRun

# -- window ------------------------------------------------------------------------------------------------------------
# A time window of a run, divided into as many equal cells as a picture has columns.

MOST_CELLS = 2000


@dataclass(frozen=True, kw_only=True)
class TimeWindow:
    """From `begin` to `end` (unix seconds); cell i of `cells` begins at begin + i cell_seconds."""

    begin: float
    end: float
    cells: int

    @property
    def cell_seconds(self) -> float:
        return (self.end - self.begin) / self.cells

    def centers(self) -> list[float]:
        return [self.begin + (cell + 0.5) * self.cell_seconds for cell in range(self.cells)]


def whole(db: sqlite3.Connection, cells: int) -> TimeWindow:
    """From the begin of the first step to the end of the last, from the first and last row of each rank."""
    ranks = ranks_of(db)
    edges = [edge for rank in ranks for edge in _edges(db, rank)]
    begin, end = (min(edges), max(edges)) if edges else (0.0, 1.0)
    return TimeWindow(begin=begin, end=max(end, begin + 1e-3), cells=clamped(cells))


def clamped(cells: int) -> int:
    return max(1, min(cells, MOST_CELLS))


def ranks_of(db: sqlite3.Connection) -> list[int]:
    """The ranks with steps, by one seek each."""
    ranks: list[int] = []
    while True:
        after = ranks[-1] if ranks else -1
        (rank,) = db.execute("SELECT min(rank) FROM step WHERE rank > ?", (after,)).fetchone()
        if rank is None:
            return ranks
        ranks.append(rank)


def _edges(db: sqlite3.Connection, rank: int) -> list[float]:
    """First and last time of a rank."""
    found = []
    for order, moment in (("ASC", "at - coalesce(seconds, 0)"), ("DESC", "at")):
        asked = f"SELECT {moment} FROM step WHERE rank = ? ORDER BY step {order} LIMIT 1"
        found += [row[0] for row in db.execute(asked, (rank,)) if row[0] is not None]
    return found


TRAINING = ("compute", "waiting", "data")  # of the training thread: their sum is `seconds`
COMMUNICATION = ("encode", "wire", "decode")  # of the communication thread, hidden behind computation or not
SUMS = ("steps", "seconds", *TRAINING, *COMMUNICATION, "bytes_sent", "bytes_pulled", "skipped")
WHOLE_ROWS = 200_000  # read in a quarter of a second
SAMPLES = 25_000  # rows to sample from a larger window

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
    """sums[name]: (ranks, cells), NaN without a step; fastest, slowest: (ranks, cells), seconds."""

    window: TimeWindow
    ranks: list[int]
    sums: dict[str, Floats]
    fastest: Floats
    slowest: Floats
    sampled: bool

    def per_step(self, name: str) -> Floats:
        """(ranks, cells): the quantity per step, averaged over the cell's steps."""
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
    """Fill a row of the grid. Rows with more steps than a cell are spread over the cells that they cover.

    found: tuples of one rank, (rank, cell, steps of a row, fastest, slowest, *SUMS). scaled_to: number of steps that
    the samples represent."""
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
    """Number of cells that each sampled step represents: those since the previous sample, but at most twice the median,
    so that absences of a rank stay empty."""
    gaps = np.diff(cells, prepend=cells[:1]).astype(np.float64)
    common = np.median(gaps[gaps > 0]) if (gaps > 0).any() else 0.0
    return np.where(gaps <= 2 * common, np.maximum(gaps - 1, 0.0), 0.0)


def _spread(grid: Grid, row: int, covered: Iterable[tuple[int, float]]) -> None:
    """covered: cells, and the number of cells that the longest row ending there covers."""
    empty = np.isnan(grid.sums["steps"][row])
    source_cell = np.where(empty, -1, np.arange(grid.window.cells))  # the cell with the rows that cover this one
    for cell, count in covered:
        before = source_cell[max(0, cell - int(count)) : cell]
        before[before < 0] = cell
    owners = source_cell[source_cell >= 0]
    shares = np.bincount(owners, minlength=grid.window.cells)[owners]
    for line in (each[row] for each in grid.sums.values()):
        line[source_cell >= 0] = line[owners] / shares
    for line in (grid.fastest[row], grid.slowest[row]):
        line[source_cell >= 0] = line[owners]


def _steps_within(db: sqlite3.Connection, rank: int, window: TimeWindow) -> tuple[int, int | None]:
    """First and last step of a rank in the window, by bisection: times increase with steps."""
    ends = "SELECT (SELECT min(step) FROM step WHERE rank = :rank), (SELECT max(step) FROM step WHERE rank = :rank)"
    least, most = db.execute(ends, {"rank": rank}).fetchone()
    if most is None:
        return 0, None
    moment = "SELECT at FROM step WHERE rank = ? AND step = ?"
    begin, end = (db.execute(moment, (rank, step)).fetchone()[0] for step in (least, most))
    return (
        least if begin is None or begin >= window.begin else _first_at(db, rank, least, most, window.begin),
        most if end is None or end <= window.end else _first_at(db, rank, least, most, window.end),
    )


def _first_at(db: sqlite3.Connection, rank: int, least: int, most: int, moment: float) -> int:
    """The smallest step from which the rank's next row is not before `moment`; `most` if there is no such row."""
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
    """Number of rows of one rank within the window, times the ranks: counting all would take as long as reading."""
    if not ranks:
        return 0
    rank = ranks[len(ranks) // 2]
    asked = "SELECT count(*) FROM step WHERE rank = ? AND step BETWEEN ? AND ?"
    return int(db.execute(asked, (rank, *edges[rank])).fetchone()[0])


# -- grid cache --------------------------------------------------------------------------------------------------------
# A grid is read once for all pictures of a page, until the run's store changes.

KEPT = 16  # grids; one of 256 ranks in 300 cells takes 8 MB

Key = tuple[object, ...]


class GridCache:
    """Thread-safe; threads that need the same grid wait for the first one to read it."""

    def __init__(self) -> None:
        self._grids: OrderedDict[Key, Grid] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: WatchedRun, cells: int, span: tuple[float, float] | None = None) -> Grid:
        """The grid of the whole run, or of `span` (unix seconds). Raises StoreError without a store."""
        with self._lock, run.reading() as db:
            key = (run.folder, cells, span, *_stamp(run))
            if key not in self._grids:
                window = whole(db, cells) if span is None else TimeWindow(begin=span[0], end=span[1], cells=cells)
                self._grids[key] = read_grid(db, window)
                while len(self._grids) > KEPT:
                    self._grids.popitem(last=False)
            self._grids.move_to_end(key)
            return self._grids[key]


def _stamp(run: WatchedRun) -> tuple[object, ...]:
    """Changes with every commit to the store: size and time of the file and of its write-ahead log."""
    found: list[object] = []
    for name in (STORE_FILE, f"{STORE_FILE}-wal"):
        try:
            state = os.stat(run.store.with_name(name))
            found += [state.st_size, state.st_mtime_ns]
        except OSError:
            found.append(None)
    return tuple(found)


# -- pictures ----------------------------------------------------------------------------------------------------------
# Grids as the columns and cells that the page draws, rounded to visible precision.

DIGITS = 4
HEAT = ("waiting", "compute", "data", "seconds", "slowest", "wire", "encode", "decode", "bytes_sent", "steps")


def heat(grid: Grid, field: str) -> dict[str, Any]:
    """One row of cells per rank. waiting: fraction of the time; bytes_sent and steps: per second; others: seconds per
    step, for `slowest` the maximum of each cell."""
    return {
        "ranks": grid.ranks,
        "begin": grid.window.begin,
        "end": grid.window.end,
        "cells": [listed(row) for row in _values(grid, field)],
        "sampled": grid.sampled,
    }


def _values(grid: Grid, field: str) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        if field == "waiting":
            return grid.sums["waiting"] / grid.sums["seconds"]
        if field == "slowest":
            return grid.slowest
        if field in ("bytes_sent", "steps"):
            return grid.sums[field] / grid.sums["seconds"]
        return grid.per_step(field)


def over_time(grid: Grid) -> dict[str, Any]:
    """Parts of the step time, and the pace in steps per second: means over ranks of each rank's mean step in a cell, so
    that the number of steps per rank does not matter."""
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a cell without a step of any rank
        per_step = {
            name: np.nanmean(grid.per_step(name), axis=0) if grid.ranks else np.full(grid.window.cells, np.nan)
            for name in ("seconds", *TRAINING, *COMMUNICATION, "bytes_sent", "bytes_pulled")
        }
        slowest = np.nanmax(grid.slowest, axis=0, initial=-np.inf)
        fastest = np.nanmin(grid.fastest, axis=0, initial=np.inf)
    return {
        "at": grid.window.centers(),
        "parts": {name: listed(line) for name, line in per_step.items()},
        "pace": listed(1 / per_step["seconds"]),
        "slowest": listed(np.where(np.isfinite(slowest), slowest, np.nan)),
        "fastest": listed(np.where(np.isfinite(fastest), fastest, np.nan)),
        "sent": grid.total("bytes_sent"),
        "pulled": grid.total("bytes_pulled"),
        "steps": grid.total("steps"),
        "skipped": grid.total("skipped"),
        "seconds_per_step": grid.total("seconds") / max(1.0, grid.total("steps")),
        "sampled": grid.sampled,
    }


def listed(line: Floats) -> list[float]:
    """Numbers with DIGITS digits; non-finite ones are encoded as null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(line))))
        rounded = np.where((line == 0) | ~np.isfinite(scale), line, np.round(line * scale) / scale)
    result: list[float] = rounded.tolist()
    return result
