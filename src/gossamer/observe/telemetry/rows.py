"""Rows: new rows of a run's store."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.base.json_text import json_text
from gossamer.observe.telemetry.store import insert

Row = dict[str, Any]
MOST_CHARACTERS = 20_000  # per text
CUT = " … [cut here: {count} characters more in the log file]"
STEPWISE = ("step", "metric", "tensor")


class NewRows:
    """Collects rows and changed columns of ranks, and writes them together.

    tables: rows by table; ranks: changed columns; rewound: steps after which a rank begins again.
    """

    def __init__(self) -> None:
        self.tables: dict[str, list[Row]] = defaultdict(list)
        self.ranks: dict[int, Row] = defaultdict(dict)
        self.rewound: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.tables or self.ranks)

    def add(self, table: str, **row: Any) -> None:
        self.tables[table].append(row)

    def event(self, at: float | None, rank: int | None, kind: str, content: Mapping[str, Any]) -> None:
        self.add("event", at=at, rank=rank, kind=kind, content=json_text(content))

    def log(self, at: float, rank: int | None, attempt: int | None, stream: str, text: str) -> None:
        level = level_of(text)
        self.add("log", at=at, rank=rank, attempt=attempt, stream=stream, level=level, text=shortened(text))

    def know(self, rank: int, **columns: Any) -> None:
        """Set columns of a rank; other columns keep their values."""
        self.ranks[rank] |= columns

    def fact(self, key: str, value: Any) -> None:
        """Set a fact of the whole run."""
        self.add("run", key=key, value=json_text(value))

    @property
    def touched(self) -> set[str]:
        return set(self.tables)

    def without(self, table: str) -> NewRows:
        """The same without the rows of one table."""
        rows = NewRows()
        rows.tables.update({name: each for name, each in self.tables.items() if name != table})
        rows.ranks.update(self.ranks)
        rows.rewound = self.rewound
        return rows

    def rewind(self, rank: int, step: int) -> None:
        """A rank repeats the steps after this one: drop its rows about them."""
        self.rewound[rank] = min(step, self.rewound.get(rank, step))
        for table in STEPWISE:
            self.tables[table] = [row for row in self.tables[table] if row["rank"] != rank or row["step"] <= step]

    def write(self, db: sqlite3.Connection) -> None:
        """Write all rows. Call it within a transaction."""
        for rank, step in self.rewound.items():
            for table in STEPWISE:
                db.execute(f"DELETE FROM {table} WHERE rank = ? AND step > ?", (rank, step))
        for table, rows in self.tables.items():
            if table != "link":
                insert(db, table, rows)
        for rank, columns in self.ranks.items():
            names = ", ".join(["rank", *columns])
            marks = ", ".join("?" * (len(columns) + 1))
            changes = ", ".join(f"{name} = excluded.{name}" for name in columns) or "rank = rank"
            db.execute(
                f"INSERT INTO rank({names}) VALUES({marks}) ON CONFLICT(rank) DO UPDATE SET {changes}",
                (rank, *columns.values()),
            )
        insert(db, "link", _between_ranks(db, self.tables.get("link", [])))


def _between_ranks(db: sqlite3.Connection, links: Sequence[Row]) -> list[Row]:
    """The links with a rank as target, reported as a process ("HOST PID" or "HOST PID RANK"); others are dropped.

    The store maps processes to ranks. For processes without rows, such as those of other machines of a fixed group, the
    reported rank is used. A relay is named by its worker.
    """
    if not links:
        return []
    known = {f"{row['machine']} {row['pid']}": row["rank"] for row in db.execute("SELECT rank, machine, pid FROM rank")}
    found = []
    for row in links:
        target, through = _rank_of(row["target"], known), row.get("through")
        if through is not None:
            relay = _rank_of(through, known)
            row = {**row, "through": "a relay without a worker" if relay is None else f"rank {relay}"}
        if target is not None:
            found.append({**row, "target": target})
    return found


def _rank_of(process: object, known: Mapping[str, int]) -> int | None:
    host, pid, rank, *_ = [*str(process).split(" "), "", ""]
    return known.get(f"{host} {pid}", int(rank) if rank.isdecimal() else None)


def shortened(text: str) -> str:
    """Cut a long text, with the number of missing characters at its end."""
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else text[:MOST_CHARACTERS] + CUT.format(count=more)


LEVELS = {
    "error": ("Traceback (most recent call last)", "ERROR", "CRITICAL", "FATAL", "Error:"),
    "warning": ("WARNING", "Warning:", "WARN "),
}


def level_of(text: str) -> str:
    """Level of a printed line, guessed from its words."""
    head = text[:300]
    return next((level for level, words in LEVELS.items() if any(word in head for word in words)), "info")
