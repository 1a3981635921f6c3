"""Window: a stretch of a run's time, cut into as many equal cells as a picture has columns."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

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
    """From the first step's begin to the latest step's end: the first and last row of each rank say it."""
    ranks = ranks_of(db)
    edges = [edge for rank in ranks for edge in _edges(db, rank)]
    begin, end = (min(edges), max(edges)) if edges else (0.0, 1.0)
    return TimeWindow(begin=begin, end=max(end, begin + 1e-3), cells=clamped(cells))


def clamped(cells: int) -> int:
    return max(1, min(cells, MOST_CELLS))


def ranks_of(db: sqlite3.Connection) -> list[int]:
    """The ranks that made a step, by one seek each."""
    ranks: list[int] = []
    while True:
        after = ranks[-1] if ranks else -1
        (rank,) = db.execute("SELECT min(rank) FROM step WHERE rank > ?", (after,)).fetchone()
        if rank is None:
            return ranks
        ranks.append(rank)


def _edges(db: sqlite3.Connection, rank: int) -> list[float]:
    """A rank's first and last moment."""
    found = []
    for order, moment in (("ASC", "at - coalesce(seconds, 0)"), ("DESC", "at")):
        asked = f"SELECT {moment} FROM step WHERE rank = ? ORDER BY step {order} LIMIT 1"
        found += [row[0] for row in db.execute(asked, (rank,)) if row[0] is not None]
    return found
