"""Ingestion: fills the stores of runs without a launcher, such as runs of torchrun, while the page is open.

Runs with a launcher until their end need none; runs with a killed launcher do. If a run's folder is not writable, a
temporary copy of its store is filled instead.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import STORE_FILE, Ingest
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.summary import read_run

LOOK_SECONDS = 1.0
STOP_SECONDS = 5.0
LAUNCHER_FILES = ".run-*/launcher.jsonl"  # exists during a run, and after a kill until the watchdog removes it
COPIED = (
    "{folder} is not writable, so new data of its ranks go to a temporary copy of its store, which is removed when "
    "this page ends"
)


@contextmanager
def writable(runs: Sequence[WatchedRun], note: Callable[[str], None]) -> Iterator[tuple[WatchedRun, ...]]:
    """The runs, with copies of the stores that are not writable here. note: called for each.

    A store that another process writes cannot even be read without access to its write-ahead log.
    """
    with ExitStack() as copies:
        yield tuple(run if os.access(run.folder, os.W_OK) else _copied(run, copies, note) for run in runs)


def _copied(run: WatchedRun, copies: ExitStack, note: Callable[[str], None]) -> WatchedRun:
    folder = Path(copies.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-watch-")))
    for suffix in ("", "-wal"):
        with suppress(OSError):
            shutil.copyfile(run.folder / f"{STORE_FILE}{suffix}", folder / f"{STORE_FILE}{suffix}")
    note(COPIED.format(folder=run.folder))
    return replace(run, copy=folder / STORE_FILE)


@contextmanager
def ingesting(runs: Sequence[WatchedRun], note: Callable[[str], None]) -> Iterator[None]:
    """Ingest runs without a launcher, in a thread. note: called once if a store cannot be filled."""
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
    """Whether a launcher fills the store, or has recorded the end of the run."""
    try:
        with run.reading() as db:
            known = read_run(db)
            fills = run.copy is None and any(run.folder.glob(LAUNCHER_FILES))
            return "started" in known and ("ended" in known or fills)
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
                note(f"new data of a run are no longer read: {problem}")
                readers.remove(reader)
    for reader in readers:
        with suppress(sqlite3.Error):
            reader.close()


def _opened(run: WatchedRun, note: Callable[[str], None]) -> Ingest | None:
    try:
        reader = Ingest(run.folder, store=run.copy)
        reader.look()
        return reader
    except (sqlite3.Error, OSError, GossamerError) as problem:
        note(f"{run.folder} is shown without new data: {problem}")
        return None
