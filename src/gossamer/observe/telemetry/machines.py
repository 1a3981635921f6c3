"""Machines: receives rows of other machines' launchers, next to an elastic run's coordinator or on machine 0.

    other launcher -> first      Pull CLOCK                     time of the first machine's clock
                                 Push BATCH, stamp (launcher, number of the batch), about {offset, error, dropped}
                                 Push DONE, stamp (launcher, -)  no more batches follow

A batch may arrive twice: its number is written together with its rows, and the second one is ignored.
"""

from __future__ import annotations

import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import Answer, Ask, Pull, Pulled, Receipt
from gossamer.errors import MalformedError
from gossamer.observe.telemetry.batches import MOST_BYTES, BatchReader
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.telemetry.store import insert, name_causes

CLOCK, BATCH, DONE = "telemetry/clock", "telemetry/batch", "telemetry/done"
MOST_WAITING = 64  # received batches that are not written yet
FULL = -1  # receipt version for a full queue: the batch may be sent again


class Ranks(Protocol):
    """Maps ranks of launchers to ranks of the store, within a transaction. launcher: 0 for the first machine."""

    def rank(self, launcher: int, number: int) -> int: ...


Numbering = Callable[[sqlite3.Connection, Collection[int]], Ranks]


class GlobalRanks:
    """Ranks of a fixed number of machines, the same in all files. Raises ValueError for any other rank."""

    def __init__(self, db: sqlite3.Connection, ranks: Collection[int]) -> None:
        self._ranks = ranks

    def rank(self, launcher: int, number: int) -> int:
        if number not in self._ranks:
            raise ValueError(f"rank {number} is not one of {len(self._ranks)} ranks")
        return number


class RankBook:
    """Assigns ranks of the store to (launcher, number in its files). The first launcher keeps its numbers.

    own: ranks of the first launcher, reserved for it.
    """

    def __init__(self, db: sqlite3.Connection, own: Collection[int] = ()) -> None:
        self._db, self._own = db, own
        row = db.execute("SELECT memory FROM source WHERE path = 'ranks'").fetchone()
        self._ranks: dict[str, int] = json.loads(row["memory"]) if row else {}

    def rank(self, launcher: int, number: int) -> int:
        name = f"{launcher}/{number}"
        if name not in self._ranks:
            taken = {*self._ranks.values(), *(() if not launcher else self._own)}
            preferred = [] if launcher else [number]
            free = (rank for rank in (*preferred, *range(len(taken) + 1)) if rank not in taken)
            self._ranks[name] = next(free)
            insert(self._db, "source", [{"path": "ranks", "offset": 0, "memory": json.dumps(self._ranks)}])
        return self._ranks[name]


@dataclass(frozen=True)
class _Arrived:
    launcher: int
    number: int
    packed: bytes
    about: Mapping[str, Any]


class MachineDesk:
    """Answers other launchers at once, from any thread; `drain` writes their rows later.

    numbering: makes the mapping of their ranks. patience_seconds: longest wait for their last rows at the end.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        numbering: Numbering = RankBook,
        patience_seconds: float = 0.0,
    ) -> None:
        self._clock, self.numbering, self._patience_seconds = clock, numbering, patience_seconds
        self._arrived: queue.Queue[_Arrived] = queue.Queue(MOST_WAITING)
        self._here: set[int] = set()  # launchers that may send more
        self._gone = threading.Condition()

    @property
    def answers(self) -> Mapping[str, Callable[[Ask], Answer]]:
        return {CLOCK: self.report_time, BATCH: self.take, DONE: self.farewell}

    def report_time(self, op: Ask) -> Answer:
        return Pulled(version=0, about=repr(self._clock()))

    def take(self, op: Ask) -> Answer:
        try:
            batch = _read(op)
            with self._gone:
                self._here.add(batch.launcher)
            self._arrived.put_nowait(batch)
        except MalformedError as problem:
            return Receipt(version=0, about=str(problem))  # a retry would fail in the same way
        except queue.Full:
            return Receipt(version=FULL)
        return Receipt(version=0)

    def farewell(self, op: Ask) -> Answer:
        if not isinstance(op, Pull):
            with self._gone:
                self._here.discard(op.stamp.worker)
                self._gone.notify_all()
        return Receipt(version=0)

    def await_farewells(self) -> None:
        """Wait until every connected launcher has sent its last rows, at most patience_seconds."""
        with self._gone:
            self._gone.wait_for(lambda: not self._here, self._patience_seconds)

    def drain(self, db: sqlite3.Connection, book: Ranks) -> None:
        """Write all received rows."""
        while True:
            try:
                batch = self._arrived.get_nowait()
            except queue.Empty:
                return
            db.execute("BEGIN IMMEDIATE")
            with db:
                self._write(db, book, batch)

    def _write(self, db: sqlite3.Connection, book: Ranks, batch: _Arrived) -> None:
        path = f"launcher/{batch.launcher}"
        row = db.execute("SELECT offset FROM source WHERE path = ?", (path,)).fetchone()
        if row is not None and batch.number <= row["offset"]:
            return
        offset = float(batch.about["offset"])
        try:
            rows = BatchReader(db).read(batch.packed, lambda number: book.rank(batch.launcher, number), offset)
        except MalformedError as problem:
            rows = NewRows()
            rows.event(self._clock(), None, "refused", {"why": str(problem)[:500]})
        for rank in tuple(rows.ranks):
            rows.know(rank, clock_offset=offset, clock_error=float(batch.about["error"]))
        if batch.about.get("dropped"):
            content = {"rows": batch.about["dropped"], "machine": batch.about.get("machine")}
            rows.event(self._clock(), None, "dropped", content)
        rows.add("source", path=path, offset=batch.number, memory="{}")
        rows.write(db)
        if "failure" in rows.touched:
            name_causes(db)


def _read(op: Ask) -> _Arrived:
    if isinstance(op, Pull) or len(op.payload) != 1 or op.payload[0].nbytes > MOST_BYTES:
        raise MalformedError("not a batch of rows")
    try:
        about = read_json(op.about)
        {name: float(about[name]) for name in ("offset", "error")}
    except (ValueError, TypeError, KeyError) as problem:
        raise MalformedError(f"a batch of rows from a machine with an unknown clock ({problem!r})") from None
    return _Arrived(op.stamp.worker, op.stamp.step, bytes(op.payload[0].numpy()), about)
