"""Runs: the watched folders, and their stores, opened to read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import STORE_FILE, open_store

TRACES = ("events-*.jsonl", ".run-*", "rank-*.log", "rank*.txt", "record.json")  # other files of a run in its folder
NO_RUN = (
    "there is no run in {path}: it has neither a {store} nor logs. Name the folder of a run's logs, as printed by "
    "`gossamer run`, such as runs/2026-01-31_12-00-00"
)
NONE_YET = (
    "no run was named, and {path} has none. Write `gossamer watch FOLDER`, or start one: gossamer run --watch "
    "--workers 2 train.py"
)


@dataclass(frozen=True)
class WatchedRun:
    """A run's folder, and its name on the page."""

    key: str
    folder: Path
    copy: Path | None = None  # copy of its store, if the folder is not writable
    label: str = ""  # empty: the folder's name

    @property
    def name(self) -> str:
        return self.label or self.folder.resolve().name

    @property
    def store(self) -> Path:
        return self.copy or self.folder / STORE_FILE

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The run's store, read-only. Raises StoreError with a message if it cannot be read (yet)."""
        db = self.open()
        try:
            yield db
        finally:
            db.close()

    def open(self) -> sqlite3.Connection:
        db = open_store(self.store, readonly=True)
        db.text_factory = _decoded
        return db


def find_runs(folders: Sequence[Path], around: Path = Path("runs")) -> tuple[WatchedRun, ...]:
    """The runs in `folders`; without folders the newest in `around`. Raises GossamerError for other folders."""
    for folder in folders:
        if not is_run(folder):
            raise GossamerError(NO_RUN.format(path=folder, store=STORE_FILE))
    chosen = list(folders) or _newest(around)
    named = zip(chosen, _labels(chosen), strict=True)
    return tuple(WatchedRun(str(number), folder, label=label) for number, (folder, label) in enumerate(named))


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths: as few as make equal names different."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(each[-count:]) for each in parts]
        if len(set(labels)) == len(set(parts)):
            return labels
    return [str(folder) for folder in folders]


def is_run(folder: Path) -> bool:
    return (folder / STORE_FILE).exists() or any(next(folder.glob(each), None) for each in TRACES)


def _newest(around: Path) -> list[Path]:
    found = [folder for folder in around.glob("*/") if is_run(folder)]
    if not found:
        raise GossamerError(NONE_YET.format(path=around.resolve()))
    return [max(found, key=lambda folder: folder.stat().st_mtime)]


def _decoded(text: bytes) -> str:
    """Decode output of a worker, which may be invalid UTF-8."""
    return text.decode(errors="replace")
