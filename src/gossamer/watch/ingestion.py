"""Ingestion: fills the stores of runs whose launcher does not, such as runs of torchrun, while the page is open.

A run whose store was written by its launcher needs none: it names its start. A folder that cannot be written keeps what
it has.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gossamer.errors import GossamerError
from gossamer.telemetry import Ingest
from gossamer.watch.runs import WatchedRun
from gossamer.watch.summary import read_run

LOOK_SECONDS = 1.0
STOP_SECONDS = 5.0


@contextmanager
def ingesting(runs: Sequence[WatchedRun], note: Callable[[str], None]) -> Iterator[None]:
    """Read what the runs that have no launcher write, in a thread. note: hears once why a store stays as it is."""
    alone = [run for run in runs if not _has_a_launcher(run)]
    over = threading.Event()
    thread = threading.Thread(target=_look, args=(alone, over, note), name="page ingestion", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(STOP_SECONDS)


def _has_a_launcher(run: WatchedRun) -> bool:
    try:
        with run.reading() as db:
            return "started" in read_run(db)
    except (GossamerError, sqlite3.Error):
        return False


def _look(runs: Sequence[WatchedRun], over: threading.Event, note: Callable[[str], None]) -> None:
    readers = [reader for run in runs if (reader := _opened(run, note)) is not None]
    while readers and not over.wait(LOOK_SECONDS):
        for reader in tuple(readers):
            try:
                while reader.look() and not over.is_set():
                    pass
            except (sqlite3.Error, OSError, GossamerError) as problem:
                note(f"what follows of a run is not read any more: {problem}")
                readers.remove(reader)
    for reader in readers:
        with suppress(sqlite3.Error):
            reader.close()


def _opened(run: WatchedRun, note: Callable[[str], None]) -> Ingest | None:
    try:
        reader = Ingest(run.folder)
        reader.look()
        return reader
    except (sqlite3.Error, OSError, GossamerError) as problem:
        note(f"{run.folder} is shown as it is: {problem}")
        return None
