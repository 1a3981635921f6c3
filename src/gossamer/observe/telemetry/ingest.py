"""Ingest: reads what is new in the files of a run and writes it into the run's store, each line exactly once.

How far each file was read is written together with what was read, so whoever goes on after a kill neither loses a line
nor reads one twice; two that read the same run at once do not disturb each other.
"""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gossamer.observe.event_log import read_entry
from gossamer.observe.telemetry import entries
from gossamer.observe.telemetry.entries import Memory
from gossamer.observe.telemetry.failures import name_causes
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.telemetry.store import STORE_FILE, open_store
from gossamer.observe.telemetry.tail import Tail, read_tail
from gossamer.observe.telemetry.thinning import Thinning

NAME = re.compile(
    r"(events|aside)-(\d+)\.jsonl|(boot|output|started|failure|finished|exited)-(\d+)-(\d+)\.(?:txt|json)"
)
STREAMS = {"boot": "stderr", "output": "stdout"}
TOLD = "launcher.jsonl"

Ranks = Callable[[int], int | None]  # a rank of the store by its number in the files; None: no worker


class Ingest:
    """Reads the run whose logs are in `folder`: `directory`, by default its newest private one, or the folder itself.

    ranks: maps numbers in files to ranks of the store, by default those that the launcher says are workers. forward:
    is given what was written, for others. clock: unix seconds, for lines that bear no moment. Raises StoreError as
    open_store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        store: Path | None = None,
        directory: Path | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.time,
        forward: Callable[[NewRows], None] = lambda rows: None,
    ) -> None:
        self._folder, self._directory, self._clock = folder, directory, clock
        self._ranks = ranks or self._worker
        self._machine = socket.gethostname()
        self._done: set[str] = set()  # files whose one report was read
        self.db = open_store(store or folder / STORE_FILE)
        self._most = self._told_workers()
        self._forward = forward
        self._thinning = Thinning(self.db)

    def look(self, *, last: bool = False) -> bool:
        """Write what is new; last: nothing follows, so that unfinished lines count. Whether there is more to read."""
        files = sorted(_files(self._directory or _newest(self._folder)))
        with _writing(self.db):
            known = {row["path"]: row for row in self.db.execute("SELECT path, offset, memory FROM source")}
            rows = NewRows()
            more = False
            for path in files:
                key = f"{path.parent.name}/{path.name}"
                if key not in self._done:
                    more |= self._read(path, key, known.get(key), rows, last)
            rows.write(self.db)
            if "failure" in rows.touched:
                name_causes(self.db)
            self._thinning.look(rows.touched)
        self._forward(rows)
        return more

    def finish(self) -> None:
        """Read all that is left, and close the store."""
        while self.look(last=True):
            pass
        self.close()

    def close(self) -> None:
        self.db.close()

    def _read(self, path: Path, key: str, before: sqlite3.Row | None, rows: NewRows, last: bool) -> bool:
        offset, memory = (before["offset"], json.loads(before["memory"])) if before else (0, {})
        if _size(path) == offset:
            return False
        tail = read_tail(path, offset, last=last or path.suffix == ".json", cuts=path.suffix == ".txt")
        if tail.offset != offset:
            self._take(path, tail, memory, rows)
            rows.add("source", path=key, offset=tail.offset, memory=json.dumps(memory))
        if path.suffix == ".json" and tail.offset:
            self._done.add(key)
        return tail.more

    def _take(self, path: Path, tail: Tail, memory: Memory, rows: NewRows) -> None:
        if path.name == TOLD:
            self._take_told(tail, rows)
            return
        found = NAME.fullmatch(path.name)
        assert found is not None
        kind, attempt = found[1] or found[3], int(found[4] or 0)
        rank = self._ranks(int(found[2] or found[5]))
        if kind in STREAMS:
            self._print(rows, rank, attempt, STREAMS[kind], tail)
        elif rank is None:
            return
        elif kind in entries.REPORTS:
            for report in _entries(tail):
                entries.REPORTS[kind](rows, rank, attempt, report)
        elif kind == "events":
            for entry in _entries(tail):
                entries.take_event(rows, rank, memory, entry)
        else:
            for entry in _entries(tail):
                entries.take_aside(rows, rank, self._machine, entry)

    def _print(self, rows: NewRows, rank: int | None, attempt: int, stream: str, tail: Tail) -> None:
        at = self._clock()
        for line in tail.lines:
            text = line.removesuffix(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            if text.strip():
                rows.log(at, rank, attempt, stream, text)

    def _take_told(self, tail: Tail, rows: NewRows) -> None:
        for entry in _entries(tail):
            match entry:
                case {"kind": "facts", "facts": facts}:
                    for key, value in facts.items():
                        rows.fact(key, value)
                    self._most = facts.get("workers") if facts.get("servers") else self._most
                case {"kind": "vitals"}:
                    entries.take_vitals(rows, None, self._machine, entry)
                case {"kind": "note", "moment": at, "text": text}:
                    rows.log(at, None, None, "launcher", text)
                case {"kind": str(kind), "moment": at, **content}:
                    rows.event(at, None, kind, content)

    def _told_workers(self) -> int | None:
        """How many of the numbers in files are workers, where servers come after them."""
        found = dict(self.db.execute("SELECT key, value FROM run WHERE key IN ('workers', 'servers')").fetchall())
        return json.loads(found["workers"]) if json.loads(found.get("servers", "0")) else None

    def _worker(self, number: int) -> int | None:
        return number if self._most is None or number < self._most else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _newest(folder: Path) -> Path:
    """Where the newest run with these logs has its files."""
    return max(folder.glob(".run-*"), key=lambda each: each.stat().st_mtime_ns, default=folder)


def _files(directory: Path) -> Iterator[Path]:
    try:
        found = list(directory.iterdir())
    except OSError:  # removed meanwhile
        return
    yield from (path for path in found if path.name == TOLD or NAME.fullmatch(path.name))


def _entries(tail: Tail) -> Iterator[dict[str, Any]]:
    for line in tail.lines:
        entry = read_entry(line)
        if entry is not None:
            yield _encodable(dict(entry)) if b"\\ud" in line else dict(entry)


def _encodable(entry: dict[str, Any]) -> dict[str, Any]:
    """Half of a pair of surrogates is no text that a store takes."""
    found: dict[str, Any] = json.loads(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace"))
    return found


def _writing(db: sqlite3.Connection) -> sqlite3.Connection:
    """A transaction that excludes other writers from here on: what was read so far is asked within it."""
    db.execute("BEGIN IMMEDIATE")
    return db
