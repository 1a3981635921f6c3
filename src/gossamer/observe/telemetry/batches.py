"""Batches: rows as bytes, for the transfer from one machine's launcher to another's.

A batch is compressed JSON: {"tables": {TABLE: [row, ...]}, "ranks": {RANK: columns}, "rewound": {RANK: step}}. Ranks
are numbers of the sending machine, and times those of its clock; the receiver converts both.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from gossamer.base.json_text import json_text, read_json
from gossamer.base.units import ranks_text
from gossamer.errors import MalformedError
from gossamer.observe.telemetry.rows import NewRows

MOST_BYTES = 2**21  # of a packed batch
MOST_JSON_BYTES = 2**26
MOMENTS = ("at", "began", "ended")
RANKS = ("rank", "source", "caused_by")
LOCAL = {"source", "run"}  # tables that stay on each machine


def pack(rows: NewRows) -> bytes | None:
    """Pack the rows; None if no row is for other machines."""
    tables = {table: each for table, each in rows.tables.items() if table not in LOCAL and each}
    if not tables and not rows.ranks and not rows.rewound:
        return None
    return zlib.compress(json_text({"tables": tables, "ranks": rows.ranks, "rewound": rows.rewound}).encode(), 1)


def count(rows: NewRows) -> int:
    return sum(len(each) for table, each in rows.tables.items() if table not in LOCAL)


class BatchReader:
    """Reads batches into rows of this store, and refuses unknown columns."""

    def __init__(self, db: sqlite3.Connection) -> None:
        tables = [row["name"] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self._columns = {
            table: {row["name"] for row in db.execute(f"PRAGMA table_info({table})")}
            for table in tables
            if table not in LOCAL
        }

    def read(self, packed: bytes, ranks: Callable[[int], int], offset: float) -> NewRows:
        """Unpack a batch. ranks: maps the sender's ranks to those of this store; offset: seconds to add to its times.
        Raises MalformedError."""
        unpacked = _unpacked(packed)
        rows = NewRows()
        try:
            for rank, columns in unpacked["ranks"].items():
                here = ranks(int(rank))
                translated = self._translated("rank", columns, ranks, offset)
                if columns.get("activity") is not None:
                    translated |= _activity(columns["activity"], here - int(rank), offset)
                rows.know(here, **translated)
            for rank, step in unpacked["rewound"].items():
                rows.rewind(ranks(int(rank)), int(step))
            for table, each in unpacked["tables"].items():
                for row in each:
                    rows.add(table, **self._translated(table, row, ranks, offset))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise MalformedError(f"a batch of rows with invalid content ({problem!r})") from None
        return rows

    def _translated(
        self, table: str, row: Mapping[str, Any], ranks: Callable[[int], int], offset: float
    ) -> dict[str, Any]:
        if not self._columns[table].issuperset(row):
            raise ValueError(f"unknown columns for {table}")
        moved = {name: row[name] + offset for name in MOMENTS if row.get(name) is not None}
        named = {name: ranks(row[name]) for name in RANKS if row.get(name) is not None}
        return {**row, **moved, **named}


def _activity(text: str, ranks_later: int, offset: float) -> dict[str, str | None]:
    """The columns of a rank's operation, whose ranks the sender numbers from its own rank on."""
    activity = read_json(text)
    first, size = activity["group"]
    waits_for = [rank + ranks_later for rank in activity["waits_for"]]
    moved = {"since": activity["since"] + offset, "group": [first + ranks_later, size], "waits_for": waits_for}
    return {"activity": json_text({**activity, **moved}), "waits_for": ranks_text(waits_for) or None}


def _unpacked(packed: bytes) -> dict[str, Any]:
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(packed, MOST_JSON_BYTES)
        if reader.unconsumed_tail:
            raise MalformedError(f"a batch of rows that unpacks to more than {MOST_JSON_BYTES} bytes")
        unpacked = read_json(text.decode())
    except (zlib.error, ValueError, UnicodeDecodeError) as problem:
        raise MalformedError(f"a batch of rows that cannot be read ({problem})") from None
    if not isinstance(unpacked, dict) or not {"tables", "ranks", "rewound"} <= unpacked.keys():
        raise MalformedError("a batch of rows with missing fields")
    return unpacked
