"""Store: the tables of a run's SQLite file, how it is opened, and how it stays small."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gossamer.errors import StoreError

# -- schema ------------------------------------------------------------------------------------------------------------
# Its tables, with units, and its version.
#
# Moments are unix seconds on the first machine's clock, durations are seconds, sizes are bytes. A column that a rank or
# a machine cannot know is NULL.

SCHEMA_VERSION = 1

TABLES = """
-- What holds for the whole run, each value as JSON: recipe, workers, script, started, ended, how, machine, versions,
-- network, parameters, foretold_seconds_per_step, foretold_for (recipe, workers, network) and foretold_interval
-- (low_seconds, high_seconds, coverage)
CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;

-- A rank and its latest attempt. state: starting, joined, training, waiting, saving, lost, left, finished, failed.
-- clock_offset: what was added to its machine's clock; clock_error: its bound. environment: JSON of versions and
-- settings. activity: JSON of the operation that has lasted for seconds, or was the last before `since`, else NULL
CREATE TABLE rank(
    rank INTEGER PRIMARY KEY, attempt INTEGER, machine TEXT, pid INTEGER, began REAL, ended REAL, state TEXT,
    waits_for TEXT, clock_offset REAL, clock_error REAL, environment TEXT,
    activity TEXT
);

-- The sum over `steps` steps that end with `step`. seconds = what passed; waiting: the training thread's, for others;
-- data: from a step's end to the next forward pass; compute: the rest; encode, wire, decode: of the communication
-- thread, hidden behind computing or not
CREATE TABLE step(
    rank INTEGER, step INTEGER, at REAL, steps INTEGER, seconds REAL, compute REAL, encode REAL, wire REAL, decode REAL,
    waiting REAL, data REAL, bytes_sent REAL, bytes_pulled REAL, skipped INTEGER, PRIMARY KEY(rank, step)
) WITHOUT ROWID;

-- What the training loop logged. value NULL: not finite
CREATE TABLE metric(
    name TEXT, step INTEGER, at REAL, rank INTEGER, value REAL, PRIMARY KEY(name, rank, step)
) WITHOUT ROWID;

-- Samples of a machine (rank NULL) or of a rank's process. Shares are fractions, sizes bytes, rates of a second
CREATE TABLE vital(machine TEXT, rank INTEGER, at REAL, name TEXT, value REAL);
CREATE INDEX vital_series ON vital(name, rank, at);

-- What one tensor costs and what of it is left unsent
CREATE TABLE tensor(
    rank INTEGER, step INTEGER, name TEXT, numel INTEGER, bytes REAL, residual_norm REAL, gradient_norm REAL,
    energy_share REAL
);
CREATE INDEX tensor_series ON tensor(name, rank, step);

-- The connection from rank `source` to rank `target`, as the source's kernel saw it. round_trip: smoothed, with
-- queues; bytes_per_second: while bytes were under way, NULL where too few were; used_bytes (acknowledged) and
-- retransmits (segments); these three since the row before. A first row is what was measured as the group began
CREATE TABLE link(
    source INTEGER, target INTEGER, at REAL, round_trip REAL, bytes_per_second REAL, used_bytes REAL, retransmits REAL
);
CREATE INDEX link_series ON link(source, target, at);

-- Lines that were printed. stream: stdout (a worker's two streams, in order), stderr (before it joins them), launcher.
-- level: info, warning, error. at: when the line was read
CREATE TABLE log(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, attempt INTEGER, stream TEXT, level TEXT, text TEXT);

-- Ends that were no success, and errors that nothing caught. kind: killed, raised, ended, echo, stopped, uncaught;
-- caused_by: the rank whose end came first, where that is another
CREATE TABLE failure(
    at REAL, rank INTEGER, attempt INTEGER, kind TEXT, message TEXT, traceback TEXT, caused_by INTEGER
);

-- What happens rarely: attached, noticed, warning, saved, switched (the recipe), group changed, collective, skipped,
-- servers, left, closed, dropped, stacks, parted (ranks whose parameters differ), caught up (the rank of the latest
-- finding, which is over), went on (those who had hung). content: JSON
CREATE TABLE event(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, kind TEXT, content TEXT);

-- Stragglers, and who hangs. cause: computing, data loading, link, stopped, garbage collection, loaded machine, hang;
-- evidence: a sentence
CREATE TABLE finding(at REAL, step INTEGER, rank INTEGER, cause TEXT, evidence TEXT);

-- How far each file of the run has been read, and what its next lines need to be understood (JSON)
CREATE TABLE source(path TEXT PRIMARY KEY, offset INTEGER, memory TEXT) WITHOUT ROWID;
"""


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


# -- failures ----------------------------------------------------------------------------------------------------------
# Which of the ends that came together caused the others.

TOGETHER_SECONDS = 60.0
RANKING = ("killed", "raised", "ended", "echo", "stopped")  # the likeliest cause first
# A rank that its launcher stopped though no rank had failed, because somebody asked the launcher to end, is no failure
NOT_ON_REQUEST = "NOT (kind = 'stopped' AND caused_by IS NULL)"
FOLLOWS = {"echo", "stopped"}
# What a launcher saw of a process that has said itself why it failed; only such rows have no traceback at all
EXIT_OF_A_REPORT = """
DELETE FROM failure WHERE traceback IS NULL AND EXISTS (
    SELECT 1 FROM failure AS told
    WHERE told.rank = failure.rank AND told.attempt = failure.attempt AND told.traceback IS NOT NULL
)
"""


def name_causes(db: sqlite3.Connection) -> None:
    """Fill in `caused_by`: of ends within a minute the likeliest cause, and of equally likely ones the first."""
    db.execute(EXIT_OF_A_REPORT)
    found = db.execute("SELECT rowid, * FROM failure WHERE kind != 'uncaught' ORDER BY at").fetchall()
    for row in found:
        near = [other for other in found if abs(other["at"] - row["at"]) <= TOGETHER_SECONDS]
        cause = min(near, key=lambda each: (RANKING.index(each["kind"]), each["at"]))
        if row["kind"] in FOLLOWS and cause["kind"] != "stopped" and cause["rank"] != row["rank"]:
            db.execute("UPDATE failure SET caused_by = ? WHERE rowid = ?", (cause["rank"], row["rowid"]))


# -- thinning ----------------------------------------------------------------------------------------------------------
# Merges old rows, so that a store stays small however long a run is.
#
# The newest quarter of a series' rows stays as it came; of what is older, rows are merged that end in the same stretch
# of steps, or seconds. Stretches are powers of two, counted from zero: those of all ranks begin together, and can be
# compared; the last one is completed when more of it is old. They double only when a series is full.

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
            for table in THINNED:
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
