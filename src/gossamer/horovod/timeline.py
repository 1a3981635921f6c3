"""Timeline: writes negotiated calls as trace-event JSON, as Horovod's timeline does: chrome://tracing reads it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gossamer import events


class CallTimeline:
    """A file of rank 0: for each tensor name when its call waited for other ranks and when it was performed.

    Args:
        path: Is overwritten.
        mark_cycles: Whether to mark each round of negotiation.
    """

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (until close)
        self._marks, self._lock, self._began = mark_cycles, threading.Lock(), time.perf_counter()
        self._rows: dict[str, int] = {}
        self._file.write("[\n")
        micros = int(time.time() * 1e6)
        self._write({"name": "start", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": micros}})

    def call(self, name: str, kind: str, submitted: float, began: float) -> None:
        """A call that ends now. submitted, began: by time.perf_counter()."""
        row, activity = self._row(name), kind.upper()
        self._span(f"NEGOTIATE_{activity}", row, submitted, began)
        self._span(activity, row, began, time.perf_counter())

    def cycle(self, began: float) -> None:
        if self._marks:
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._micros(began)})

    def close(self) -> None:
        self._append("{}]\n")
        with suppress(OSError):
            self._file.close()

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": self._rows[name], "args": {"name": name}})
        return self._rows[name]

    def _span(self, activity: str, row: int, begin: float, end: float) -> None:
        micros = self._micros(begin)
        self._write({"name": activity, "ph": "X", "pid": row, "ts": micros, "dur": self._micros(end) - micros})

    def _micros(self, moment: float) -> float:
        return round(max(0.0, moment - self._began) * 1e6, 1)

    def _write(self, event: dict[str, Any]) -> None:
        self._append(f"{json.dumps(event)},\n")

    def _append(self, text: str) -> None:
        """Append to the file. A full disk ends the timeline, and not the training."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                with suppress(OSError):
                    self._file.close()
                events.notice(
                    f"the timeline {self._file.name} ends here, since it cannot be written ({error.strerror}). "
                    "Training continues"
                )
