"""News: a stream of server-sent events that tells a page what is new in its runs, and goes on where it was cut off.

`tick` says that a run's store has changed, with its summary; `news` brings the failures and stragglers that were not
told yet, and how many log lines and events there are. An event's id is the place in every run up to which all was told,
so the browser's Last-Event-ID is all that a new connection needs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from gossamer.errors import GossamerError
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.summary import summarize

WAKE_SECONDS = 1.0
ALIVE_SECONDS = 15.0  # between comments that keep a silent connection open
TABLES = ("log", "event", "failure", "finding")


@dataclass(frozen=True)
class NewsPlace:
    """The row ids up to which a run's news was told, by table in the order of TABLES."""

    told: tuple[int, ...] = (0, 0, 0, 0)

    def __str__(self) -> str:
        return ".".join(map(str, self.told))


def read_places(text: str, count: int) -> list[NewsPlace | None]:
    """Places from an event's id, `1.2.3.4,5.6.7.8`; None, the end of what there is, for a run that is not in it."""
    found: list[NewsPlace | None] = [None] * count
    for number, each in enumerate(text.split(",")[:count]):
        parts = each.split(".")
        if len(parts) == len(TABLES) and all(part.isdigit() and len(part) < 19 for part in parts):
            found[number] = NewsPlace(tuple(map(int, parts)))
    return found


class RunNews:
    """What one run has new, for one page. Its connection sees other connections' commits by PRAGMA data_version."""

    def __init__(self, run: WatchedRun, place: NewsPlace | None) -> None:
        self.run, self.place = run, place
        self._db: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._problem: str | None = None

    def look(self) -> list[tuple[str, dict[str, Any]]]:
        """(event, content) of what has happened since the last look."""
        try:
            return self._look()
        except (GossamerError, sqlite3.Error) as problem:
            self.close()
            repeated, self._problem = str(problem) == self._problem, str(problem)
            return [] if repeated else [("tick", {"key": self.run.key, "problem": str(problem)})]

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = self._seen = None

    def _look(self) -> list[tuple[str, dict[str, Any]]]:
        if self._db is None:
            self._db = self.run.open()
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._seen:
            return []
        self._seen, self._problem = version, None
        now = NewsPlace(
            tuple(self._db.execute(f"SELECT coalesce(max(rowid), 0) FROM {each}").fetchone()[0] for each in TABLES)
        )
        events = [("tick", {"key": self.run.key, **summarize(self._db)})]
        if self.place is not None and now != self.place:
            events.append(("news", {"key": self.run.key, **self._rows_between(self.place, now)}))
        self.place = now
        return events

    def _rows_between(self, told: NewsPlace, now: NewsPlace) -> dict[str, Any]:
        assert self._db is not None
        content: dict[str, Any] = {}
        for table, first, last in zip(TABLES, told.told, now.told, strict=True):
            content[table] = max(0, last - first)
        for table in ("failure", "finding"):
            asked = f"SELECT rowid AS id, * FROM {table} WHERE rowid > ? AND rowid <= ? ORDER BY rowid LIMIT 20"
            place = TABLES.index(table)
            content[f"{table}s"] = [dict(row) for row in self._db.execute(asked, (told.told[place], now.told[place]))]
        return content


async def stream(
    runs: Sequence[WatchedRun], last_event: str, stopping: Callable[[], bool], wake_seconds: float = WAKE_SECONDS
) -> AsyncIterator[bytes]:
    """Server-sent events until `stopping`; one at once, whatever has changed."""
    places = read_places(last_event, len(runs))
    listened = [RunNews(run, place) for run, place in zip(runs, places, strict=True)]
    silent = 0.0
    try:
        yield b"retry: 2000\n\n"
        while not stopping():
            for news in listened:
                for kind, content in await anyio.to_thread.run_sync(news.look):
                    identity = ",".join(str(each.place or NewsPlace()) for each in listened)
                    yield f"id: {identity}\nevent: {kind}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"
                    silent = 0.0
            if silent >= ALIVE_SECONDS:
                yield b": still here\n\n"
                silent = 0.0
            await anyio.sleep(wake_seconds)
            silent += wake_seconds
    finally:
        for news in listened:
            news.close()
