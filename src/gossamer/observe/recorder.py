"""Recorder: logs the events of one rank for the run's record, and writes a few live lines per second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gossamer import events
from gossamer.events import Attached, Event, Logged, Noticed, Saved, Skipped, StepEnded
from gossamer.observe.event_log import EventLog, LineFile, event_log_path, truncated_path

LIVE_SECONDS = 0.1


def live_path(directory: Path, rank: int) -> Path:
    return directory / f"live-{rank}.jsonl"


class Recorder:
    """Listener of one rank: `events.subscribe(Recorder(directory, rank))`; call `close()` at the end.

    Live lines about steps come from selected ranks, at most ten per second; notices, skipped steps and checkpoints from
    all. If a script attaches several times, the numbers are those of the last session. A restarted worker continues its
    event log, and truncates its live lines. interface_bytes: reads the counter of bytes sent by this worker's host, if
    there is one.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        steps_live: bool = True,
        interface_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._truncated = truncated_path(directory, rank)
        self._truncated.unlink(missing_ok=True)  # of the previous start
        self._log_file = LineFile(event_log_path(directory, rank), events.notice)
        self._live_file = LineFile(live_path(directory, rank), lambda sentence: None, truncate=True)
        self._log = EventLog(self._log_file.append, interface_bytes)
        self._live = LiveLines(self._live_file.append, steps_live)
        self._lock = threading.RLock()  # steps and notices may come from different threads; a full disk is a notice

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._log(event)
            self._live(event)

    def close(self, failed: bool = False) -> None:
        """Log the regular end of this process. failed: whether an error ended it."""
        with self._lock:
            self._log.end(failed)
            if not self._log_file.close():
                with suppress(OSError):
                    self._truncated.touch()
            self._live_file.close()


class LiveLines:
    """Turns a session's events into the lines of a live view; `put` gets each as a dict."""

    def __init__(self, put: Callable[[dict[str, Any]], None], steps_live: bool = True) -> None:
        self._put = put
        self._steps_live = steps_live
        self._began = self._next = 0.0  # times of attach, and of the next line about a step
        self._steps = 0
        self._latest: dict[str, float] = {}  # latest value of each metric
        self._takes: Mapping[type[Event], Callable[[Any], None]] = {
            StepEnded: self._step,
            Logged: self._log,
            Attached: self._attach,
            Skipped: self._skip,
            Noticed: self._notice,
            Saved: self._save,
        }

    def __call__(self, event: Event) -> None:
        take = self._takes.get(type(event))
        if take is not None:
            take(event)

    def _attach(self, event: Attached) -> None:
        self._began, self._steps, self._latest = event.moment, 0, {}
        self._put_entry("attached", recipe=event.recipe, workers=event.world, parameters=event.parameters)

    def _step(self, event: StepEnded) -> None:
        self._steps += 1
        if self._steps_live and event.moment >= self._next:
            self._next = event.moment + LIVE_SECONDS
            self._put_entry(
                "step",
                step=event.step,
                seconds=event.moment - self._began,
                steps_made=self._steps,
                waiting_share=event.waiting_seconds / event.seconds if event.seconds > 0 else 0.0,
                bytes_sent=event.bytes_sent,
                metrics=_finite(self._latest),
            )

    def _log(self, event: Logged) -> None:
        self._latest |= event.values

    def _skip(self, event: Skipped) -> None:
        about = {"step": event.step, "rank": event.rank, "tensor": event.tensor, "scaled": event.scaled}
        self._put_entry("skipped", **about, **({} if event.batch is None else {"batch": event.batch}))

    def _notice(self, event: Noticed) -> None:
        self._put_entry("noticed", message=event.message)

    def _save(self, event: Saved) -> None:
        self._put_entry("saved", step=event.step, directory=event.directory)

    def _put_entry(self, kind: str, **content: Any) -> None:
        self._put({"kind": kind, **content})


def _finite(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics with non-finite values as text, since JSON has no number for them."""
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
