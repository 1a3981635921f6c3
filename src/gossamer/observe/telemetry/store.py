"""Store: the tables of a run's SQLite file, opening it, and limiting its size."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gossamer.errors import StoreError

# -- schema ------------------------------------------------------------------------------------------------------------
# The tables with units, and the schema version.
#
# Times are unix seconds on the first machine's clock, durations are seconds, sizes are bytes. Unknown values are NULL.

SCHEMA_VERSION = 1

TABLES = """
-- Facts of the whole run, each value as JSON: recipe, workers, script, started, ended, how, machine, versions,
-- network, parameters, estimated_seconds_per_step (the estimate), estimated_for (recipe, workers, network) and
-- estimated_interval (low_seconds, high_seconds, coverage)
CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;

-- A rank and its latest attempt. state: starting, joined, training, waiting, saving, lost, left, finished, failed.
-- clock_offset: added to its machine's clock; clock_error: its bound. environment: JSON of versions and
-- settings. activity: JSON of the operation that has lasted for seconds, or was the last before `since`, else NULL
CREATE TABLE rank(
    rank INTEGER PRIMARY KEY, attempt INTEGER, machine TEXT, pid INTEGER, began REAL, ended REAL, state TEXT,
    waits_for TEXT, clock_offset REAL, clock_error REAL, environment TEXT,
    activity TEXT
);

-- The sum over `steps` steps that end with `step`. seconds: elapsed; waiting: the training thread's, for others;
-- data: from the end of a step to the next forward pass; compute: the rest; encode, wire, decode: of the communication
-- thread, hidden behind computation or not
CREATE TABLE step(
    rank INTEGER, step INTEGER, at REAL, steps INTEGER, seconds REAL, compute REAL, encode REAL, wire REAL, decode REAL,
    waiting REAL, data REAL, bytes_sent REAL, bytes_pulled REAL, skipped INTEGER, PRIMARY KEY(rank, step)
) WITHOUT ROWID;

-- Metrics of the training loop. value NULL: not finite
CREATE TABLE metric(
    name TEXT, step INTEGER, at REAL, rank INTEGER, value REAL, PRIMARY KEY(name, rank, step)
) WITHOUT ROWID;

-- Samples of a machine (rank NULL) or of a rank's process. Shares are fractions, sizes bytes, rates per second
CREATE TABLE vital(machine TEXT, rank INTEGER, at REAL, name TEXT, value REAL);
CREATE INDEX vital_series ON vital(name, rank, at);

-- Traffic and residual of one tensor
CREATE TABLE tensor(
    rank INTEGER, step INTEGER, name TEXT, numel INTEGER, bytes REAL, residual_norm REAL, gradient_norm REAL,
    energy_share REAL
);
CREATE INDEX tensor_series ON tensor(name, rank, step);

-- The connection from rank `source` to rank `target`, as measured by the source's kernel. round_trip: smoothed, with
-- queues; bytes_per_second: while bytes were in flight, NULL if too few; used_bytes (acknowledged) and retransmits
-- (segments); these three since the row before. through: the relay, such as "rank 0"; NULL for a direct connection. The
-- first row is the measurement at the group's begin
CREATE TABLE link(
    source INTEGER, target INTEGER, at REAL, round_trip REAL, bytes_per_second REAL, used_bytes REAL, retransmits REAL,
    through TEXT
);
CREATE INDEX link_series ON link(source, target, at);

-- Printed lines. stream: stdout (a worker's two streams, in order), stderr (before it joins them), launcher.
-- level: info, warning, error. at: when the line was read
CREATE TABLE log(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, attempt INTEGER, stream TEXT, level TEXT, text TEXT);

-- Unsuccessful ends, and uncaught errors. kind: killed, raised, ended, echo, stopped, uncaught; caused_by: the rank
-- with the root failure, if that is another one
CREATE TABLE failure(
    at REAL, rank INTEGER, attempt INTEGER, kind TEXT, message TEXT, traceback TEXT, caused_by INTEGER
);

-- Rare events: attached, noticed, warning, saved, switched (the recipe), group changed, collective, skipped,
-- servers, left, closed, dropped, stacks, parted (ranks with different parameters), caught up (the rank of the latest
-- finding, which is over), `went on` (ranks after a hang). content: JSON
CREATE TABLE event(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, kind TEXT, content TEXT);

-- Stragglers and hangs. cause: computing, data loading, link, stopped, garbage collection, loaded machine, hang;
-- evidence: a sentence
CREATE TABLE finding(at REAL, step INTEGER, rank INTEGER, cause TEXT, evidence TEXT);

-- Read offset of each file of the run, and the context for its next lines (JSON)
CREATE TABLE source(path TEXT PRIMARY KEY, offset INTEGER, memory TEXT) WITHOUT ROWID;
"""


STORE_FILE = "run.sqlite"
BUSY_SECONDS = 10.0

Row = Mapping[str, Any]


def open_store(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """Open a run's store; without `readonly`, create it if it does not exist.

    Rows are sqlite3.Row, with columns by name. Writers use `with db:` around a transaction; readers see all of it or
    nothing, and neither blocks the other. The connection may move between threads, one at a time.

    Raises:
        StoreError: the file does not exist, is not a store, or was written by a newer version.
    """
    try:
        db = _connect(path, readonly)
    except (sqlite3.Error, OSError) as problem:
        missing = "it does not exist" if not path.exists() else str(problem)
        raise StoreError(
            f"{path} cannot be opened as a run's store ({missing}). Name a run's folder of logs with a "
            f"{STORE_FILE}: `gossamer run` writes it."
        ) from None
    try:
        _settle(db, path, readonly)
    except BaseException:
        db.close()
        raise
    return db


def insert(db: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    """Write rows with the same columns; a row with an existing key replaces the old one."""
    waiting = iter(rows)
    for first in waiting:
        columns, values = ", ".join(first), ", ".join(f":{name}" for name in first)
        db.executemany(f"INSERT OR REPLACE INTO {table}({columns}) VALUES({values})", chain([first], waiting))


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    # Readers also create the index of a write-ahead log: mode=ro, but not immutable=1, which would not see changes
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
    except sqlite3.OperationalError as problem:  # a full or failing disk
        raise StoreError(f"{path} cannot be used as a run's store ({problem}).") from None
    except sqlite3.DatabaseError as problem:
        raise StoreError(
            f"{path} is not a run's store ({problem}). Move it away: `gossamer run` makes a new one."
        ) from None
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer version of Gossamer (schema {version}, this one knows {SCHEMA_VERSION}), "
            "so its tables may mean something else. Read it with that version: pip install -U gossamer"
        )
    if not version:
        raise StoreError(f"{path} is empty: its run has not written anything yet. Try again in a second.")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _create(db: sqlite3.Connection) -> int:
    """Create all tables in one transaction, safe with concurrent processes. The write-ahead log survives a kill."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("BEGIN IMMEDIATE")
    with db:
        if not (version := _version(db)):
            for statement in TABLES.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return version or SCHEMA_VERSION


# -- failures ----------------------------------------------------------------------------------------------------------
# Finds the root cause among failures at about the same time.

TOGETHER_SECONDS = 60.0
RANKING = ("killed", "raised", "ended", "echo", "stopped")  # in order of likelihood of being the cause
# A rank that its launcher stopped on request, without a failed rank, is not a failure
NOT_ON_REQUEST = "NOT (kind = 'stopped' AND caused_by IS NULL)"
FOLLOWS = {"echo", "stopped"}
# A rank that raises the KeyboardInterrupt of its launcher's signal was stopped on request
STOPPED_WITH_A_REPORT = """
UPDATE failure SET kind = 'stopped' WHERE kind = 'raised' AND message LIKE 'KeyboardInterrupt%' AND EXISTS (
    SELECT 1 FROM failure AS ended
    WHERE ended.rank = failure.rank AND ended.attempt = failure.attempt AND ended.kind = 'stopped'
)
"""
# Exits observed by a launcher for a process with its own failure report; only such rows have no traceback
EXIT_OF_A_REPORT = """
DELETE FROM failure WHERE traceback IS NULL AND EXISTS (
    SELECT 1 FROM failure AS report
    WHERE report.rank = failure.rank AND report.attempt = failure.attempt AND report.traceback IS NOT NULL
)
"""


def name_causes(db: sqlite3.Connection) -> None:
    """Fill in `caused_by`: of failures within a minute the likeliest cause, the first of equally likely ones."""
    db.execute(STOPPED_WITH_A_REPORT)
    db.execute(EXIT_OF_A_REPORT)
    found = db.execute("SELECT rowid, * FROM failure WHERE kind != 'uncaught' ORDER BY at").fetchall()
    for row in found:
        near = [other for other in found if abs(other["at"] - row["at"]) <= TOGETHER_SECONDS]
        cause = min(near, key=lambda each: (RANKING.index(each["kind"]), each["at"]))
        if row["kind"] in FOLLOWS and cause["kind"] != "stopped" and cause["rank"] != row["rank"]:
            db.execute("UPDATE failure SET caused_by = ? WHERE rowid = ?", (cause["rank"], row["rowid"]))


# -- thinning ----------------------------------------------------------------------------------------------------------
# Merges old rows, so that a store stays small in long runs.
#
# The newest quarter of a series' rows stays unchanged; older rows are merged that end in the same interval of steps or
# seconds. Intervals are powers of two from zero, the same for all ranks, so that ranks can be compared. The last one is
# completed when more rows are old. Intervals double only when a series is full.

LOOKS_BETWEEN = 30  # between merges, which scan tables
LEAST_ROWS = 16  # per series, for any number of series
LOG_ROWS = 100_000  # the oldest lines are deleted first; the log files keep all
EVENT_ROWS = 100_000
MOST_CHARACTERS = 40_000_000  # of all lines, or of all events: rows may be long
TOO_LONG = """
DELETE FROM {name} WHERE id <= (
    SELECT MAX(id) FROM (SELECT id, SUM(LENGTH({text})) OVER (ORDER BY id DESC) AS total FROM {name}) WHERE total > ?
)
"""


@dataclass(frozen=True, kw_only=True)
class ThinnedTable:
    """series: columns that identify a series; along: column that orders its rows; most: rows of the table; merged: SQL
    for the other columns of merged rows."""

    name: str
    series: tuple[str, ...]
    along: str
    most: int
    merged: tuple[tuple[str, str], ...]


def _each(how: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{how}({name})") for name in names)


SUMS = ("steps", "seconds", "compute", "encode", "wire", "decode", "waiting", "data")
THINNED = (
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
        merged=(
            *_each("AVG", "round_trip", "bytes_per_second"),
            *_each("SUM", "used_bytes", "retransmits"),
            *_each("MAX", "through"),
        ),
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
    """Merges rows of tables that are too large, now and then. Call it within the writing transaction.

    share: fraction of the rows that the tables may have.
    """

    def __init__(self, db: sqlite3.Connection, share: float = 1.0) -> None:
        self._db, self._share = db, share
        self._looks = 0
        self._touched: set[str] = set()

    def look(self, touched: Collection[str]) -> None:
        """touched: tables that were written."""
        self._touched |= set(touched)
        self._looks += 1
        if self._looks % LOOKS_BETWEEN == 0:
            for table in THINNED:
                if table.name in self._touched:
                    thin(self._db, table, int(table.most * self._share))
            for name, most, text in (("log", LOG_ROWS, "text"), ("event", EVENT_ROWS, "content")):
                if name in self._touched:
                    self._db.execute(f"DELETE FROM {name} WHERE id <= (SELECT MAX(id) FROM {name}) - ?", (most,))
                    self._db.execute(TOO_LONG.format(name=name, text=text), (MOST_CHARACTERS,))
            self._touched.clear()


def thin(db: sqlite3.Connection, table: ThinnedTable, most: int) -> None:
    """Limit every series to its equal part of `most` rows if the table has more."""
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
    # A step belongs to the interval that it ends: 1..8, not 0..7
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
