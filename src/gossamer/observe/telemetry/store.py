"""Store: opens a run's SQLite file, whose tables schema.py describes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from gossamer.errors import StoreError
from gossamer.observe.telemetry.schema import SCHEMA_VERSION, TABLES

STORE_FILE = "run.sqlite"
BUSY_SECONDS = 10.0

Row = Mapping[str, Any]


def open_store(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """Open a run's store; without `readonly`, make it where it is not there yet.

    Rows come as sqlite3.Row, to be asked by name. Who writes says `with db:` around what belongs together; readers see
    all of it or nothing, and neither waits for the other. The connection may pass from thread to thread, one at a time.
    Raises StoreError where the file is not there, is no store, or was written by a newer version.
    """
    try:
        db = _connect(path, readonly)
    except (sqlite3.Error, OSError) as problem:
        missing = "it is not there" if not path.exists() else str(problem)
        raise StoreError(
            f"{path} cannot be opened as a run's store ({missing}). Name the folder of a run's logs that has a "
            f"{STORE_FILE}: `gossamer run` writes it."
        ) from None
    try:
        _settle(db, path, readonly)
    except BaseException:
        db.close()
        raise
    return db


def insert(db: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    """Write rows by column, all with the same columns; one with the key of an older one replaces it."""
    waiting = iter(rows)
    for first in waiting:
        columns, values = ", ".join(first), ", ".join(f":{name}" for name in first)
        db.executemany(f"INSERT OR REPLACE INTO {table}({columns}) VALUES({values})", chain([first], waiting))


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    # The index of a write-ahead log is made by readers, too: mode=ro, but no immutable=1, which would not see changes
    how = "ro" if readonly else "rwc"
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={how}",
        uri=True,
        timeout=BUSY_SECONDS,
        check_same_thread=False,
    )
    db.row_factory = sqlite3.Row
    return db


def _settle(db: sqlite3.Connection, path: Path, readonly: bool) -> None:
    try:
        version = _version(db)
        if not version and not readonly:
            version = _create(db)
    except sqlite3.OperationalError as problem:  # a full disk, or one that fails
        raise StoreError(f"{path} cannot be used as a run's store ({problem}).") from None
    except sqlite3.DatabaseError as problem:
        raise StoreError(
            f"{path} is no store of a run ({problem}). Move it away: `gossamer run` makes a new one."
        ) from None
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer version of Gossamer (schema {version}, this one knows {SCHEMA_VERSION}), "
            "so its tables may mean something else. Read it with that version: pip install -U gossamer"
        )
    if not version:
        raise StoreError(f"{path} is empty: the run that makes it has not written anything yet. Try again in a second.")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _create(db: sqlite3.Connection) -> int:
    """All tables or none, however many processes try at once. The log of writes outlives a process that is killed."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("BEGIN IMMEDIATE")
    with db:
        if not (version := _version(db)):
            for statement in TABLES.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return version or SCHEMA_VERSION
