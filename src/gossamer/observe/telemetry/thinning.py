"""Thinning: merges old rows, so that a store stays small however long a run is.

The newest quarter of a series' rows stays as it came; of what is older, rows are merged that end in the same stretch of
steps, or seconds. Stretches are powers of two, counted from zero: those of all ranks begin together, and can be
compared; the last one is completed when more of it is old. They double only when a series is full.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass

LOOKS_BETWEEN = 30  # merging is a look through tables
LEAST_ROWS = 16  # of a series, however many series there are
LOG_ROWS = 100_000  # the oldest lines go first; the files beside the store keep all
EVENT_ROWS = 100_000
MOST_CHARACTERS = 40_000_000  # of all lines, or of all events: rows may be long
TOO_LONG = """
DELETE FROM {name} WHERE id <= (
    SELECT MAX(id) FROM (SELECT id, SUM(LENGTH({text})) OVER (ORDER BY id DESC) AS total FROM {name}) WHERE total > ?
)
"""


@dataclass(frozen=True, kw_only=True)
class ThinnedTable:
    """series: columns whose values tell one series from another; along: what its rows are ordered by; most: rows of
    the table; merged: what becomes of the other columns of rows that are merged."""

    name: str
    series: tuple[str, ...]
    along: str
    most: int
    merged: tuple[tuple[str, str], ...]


def _each(how: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{how}({name})") for name in names)


SUMS = ("steps", "seconds", "compute", "encode", "wire", "decode", "waiting", "data")
TABLES = (
    ThinnedTable(
        name="step",
        series=("rank",),
        along="step",
        most=400_000,
        merged=(*_each("MAX", "at"), *_each("SUM", *SUMS, "bytes_sent", "bytes_pulled", "skipped")),
    ),
    ThinnedTable(
        name="metric",
        series=("name", "rank"),
        along="step",
        most=400_000,
        merged=(*_each("MAX", "at"), *_each("AVG", "value")),
    ),
    ThinnedTable(
        name="vital", series=("name", "rank", "machine"), along="at", most=500_000, merged=_each("AVG", "value")
    ),
    ThinnedTable(
        name="link",
        series=("source", "target"),
        along="at",
        most=300_000,
        merged=(*_each("AVG", "round_trip", "bytes_per_second"), *_each("SUM", "used_bytes", "retransmits")),
    ),
    ThinnedTable(
        name="tensor",
        series=("name", "rank"),
        along="step",
        most=100_000,
        merged=(
            *_each("MAX", "numel"),
            *_each("AVG", "bytes", "residual_norm", "gradient_norm", "energy_share"),
        ),
    ),
)


class Thinning:
    """Merges what has become too much, now and then. Call within the transaction that has written.

    share: of the rows that the tables may have.
    """

    def __init__(self, db: sqlite3.Connection, share: float = 1.0) -> None:
        self._db, self._share = db, share
        self._looks = 0
        self._touched: set[str] = set()

    def look(self, touched: Collection[str]) -> None:
        """touched: tables that were written to."""
        self._touched |= set(touched)
        self._looks += 1
        if self._looks % LOOKS_BETWEEN == 0:
            for table in TABLES:
                if table.name in self._touched:
                    thin(self._db, table, int(table.most * self._share))
            for name, most, text in (("log", LOG_ROWS, "text"), ("event", EVENT_ROWS, "content")):
                if name in self._touched:
                    self._db.execute(f"DELETE FROM {name} WHERE id <= (SELECT MAX(id) FROM {name}) - ?", (most,))
                    self._db.execute(TOO_LONG.format(name=name, text=text), (MOST_CHARACTERS,))
            self._touched.clear()


def thin(db: sqlite3.Connection, table: ThinnedTable, most: int) -> None:
    """Have every series at most its equal part of `most` rows, once more than that are there."""
    keys = ", ".join(table.series)
    count = db.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()[0]
    if count <= most:
        return
    series = db.execute(
        f"SELECT {keys}, COUNT(*) AS count, MIN({table.along}) AS first FROM {table.name} GROUP BY {keys}"
    ).fetchall()
    part = max(LEAST_ROWS, most // len(series))
    for row in series:
        if row["count"] > part:
            _thin_series(db, table, row, part)


def _thin_series(db: sqlite3.Connection, table: ThinnedTable, one: sqlite3.Row, part: int) -> None:
    where = " AND ".join(f"{name} IS ?" for name in table.series)
    which = tuple(one[name] for name in table.series)
    along, name = table.along, table.name
    newest = db.execute(
        f"SELECT {along} FROM {name} WHERE {where} ORDER BY {along} DESC LIMIT 1 OFFSET ?", (*which, part // 4)
    ).fetchone()[0]
    stretch = 1
    while (newest - one["first"]) / stretch > part // 2:
        stretch *= 2
    # A step belongs to the stretch that it ends: 1..8, not 0..7
    place = f"({along} - 1) / {stretch}" if along == "step" else f"CAST({along} / {stretch} AS INTEGER)"
    names = (*table.series, along, *(name for name, _ in table.merged))
    made = (*table.series, f"MAX({along})", *(how for _, how in table.merged))
    chosen = ", ".join(f"{how} AS {each}" for each, how in zip(names, made, strict=True))
    db.execute(
        f"CREATE TEMP TABLE merged AS SELECT {chosen} FROM {name} WHERE {where} AND {along} <= ? GROUP BY {place}",
        (*which, newest),
    )
    db.execute(f"DELETE FROM {name} WHERE {where} AND {along} <= ?", (*which, newest))
    db.execute(f"INSERT INTO {name}({', '.join(names)}) SELECT {', '.join(names)} FROM merged")
    db.execute("DROP TABLE merged")
