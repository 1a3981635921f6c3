"""Grid cache: a grid that several pictures of a page show is read once, until the run's store changes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from gossamer.observe.telemetry import STORE_FILE
from gossamer.observe.watch.grid import Grid, read_grid
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.window import TimeWindow, whole

KEPT = 16  # grids; one of 256 ranks in 300 cells takes 8 MB

Key = tuple[object, ...]


class GridCache:
    """Safe for threads, of which one reads while the others wait for the same."""

    def __init__(self) -> None:
        self._grids: OrderedDict[Key, Grid] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: WatchedRun, cells: int, span: tuple[float, float] | None = None) -> Grid:
        """The grid of the whole run, or of `span` (unix seconds). Raises StoreError where there is no store."""
        with self._lock, run.reading() as db:
            key = (run.folder, cells, span, *_stamp(run))
            if key not in self._grids:
                window = whole(db, cells) if span is None else TimeWindow(begin=span[0], end=span[1], cells=cells)
                self._grids[key] = read_grid(db, window)
                while len(self._grids) > KEPT:
                    self._grids.popitem(last=False)
            self._grids.move_to_end(key)
            return self._grids[key]


def _stamp(run: WatchedRun) -> tuple[object, ...]:
    """Changes with every commit to the store: its size and time, and those of its write-ahead log."""
    found: list[object] = []
    for name in (STORE_FILE, f"{STORE_FILE}-wal"):
        try:
            state = os.stat(run.store.with_name(name))
            found += [state.st_size, state.st_mtime_ns]
        except OSError:
            found.append(None)
    return tuple(found)
