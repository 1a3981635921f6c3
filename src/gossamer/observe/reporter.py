"""Reporter: shows progress and writes the record of rank 0's session where no `gossamer run` does."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from gossamer import events
from gossamer.base.units import bytes_text, seconds_text, share_text, short
from gossamer.events import Attached, Closed, Ended, Event, Logged, StepEnded
from gossamer.observe import record as records
from gossamer.observe.event_log import LOG_SUFFIX, Entry, EventLog, LineFile
from gossamer.observe.live import Progress
from gossamer.observe.rank_record import Tally
from gossamer.observe.recorder import LiveLines
from gossamer.observe.status_line import StatusLine, standard_error

REWRITE_SECONDS = 60.0  # at most between two writings of a record while training goes on; at first it doubles
REWRITE_SHARE = 0.005  # of the time, at most


class Reporter:
    """A listener for one session of this process's: its end is Closed, or the interpreter's.

    lines: whether to show any. record: the file for a record of this rank alone, since no other is asked at the end,
    when it may be lost. It is rewritten as training goes on, and an event log beside it holds the last second too.
    """

    def __init__(self, *, lines: bool, record: Path | None, stream: Callable[[], TextIO] = standard_error) -> None:
        self._lines = lines
        self._file = None if record is None else RecordFile(record)
        self._stream = stream
        self._progress = Progress()
        self._live = LiveLines(self._hear)
        self._summary: Summary | None = None  # from attach to the end
        self._lock = threading.RLock()  # steps and notices may come from different threads; a full disk is a notice
        self._process = os.getpid()
        self._unsubscribe = events.subscribe(self, shows_notices=False)
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._file is not None:
                self._file.hear(event)
            self._live(event)
            self._take(event)

    def close(self, ended: Ended | None = None) -> None:
        """Say and write how it ended; once. Without a word about that, as the interpreter does."""
        if os.getpid() != self._process:
            return
        with self._lock:
            atexit.unregister(self.close)
            self._unsubscribe()
            self._unsubscribe = lambda: None
            ended = ended or events.ended_by(getattr(sys, "last_type", None))
            summary, self._summary = self._summary, None
            written = self._file.close(ended) if self._file is not None else None
            if self._lines and summary is not None and summary.steps:
                self._status.say(summary.text(ended, written))

    def _take(self, event: Event) -> None:
        match event:
            case Attached():
                self._summary = Summary(event)
                self._status = StatusLine(event.moment, self._stream)
            case StepEnded() if self._summary is not None:
                self._summary.add(event)
                if self._lines and self._status.is_due(event.moment):
                    self._status.show(str(self._progress), event.moment)
            case Logged() if self._summary is not None:
                self._summary.loss = event.values.get("loss", self._summary.loss)
            case Closed():
                self.close(event.ended)

    def _hear(self, line: dict[str, Any]) -> None:
        sentence = self._progress.take(line)
        if not self._lines or self._summary is None:
            return
        if line["kind"] == "noticed":
            self._status.leave()  # the log shows it
        elif sentence:
            self._status.say(sentence)


class Summary:
    """Totals of a session, for the line at its end."""

    def __init__(self, attached: Attached) -> None:
        self._began = self._latest = attached.moment
        self.steps = 0
        self.loss: float | None = None  # the latest
        self._seconds = self._waiting_seconds = self._bytes_sent = 0.0

    def add(self, step: StepEnded) -> None:
        self._latest = step.moment
        self.steps += 1
        self._seconds += step.seconds
        self._waiting_seconds += step.waiting_seconds
        self._bytes_sent += step.bytes_sent

    def text(self, ended: Ended, record: Path | None) -> str:
        return " · ".join(self._parts(ended, record))

    def _parts(self, ended: Ended, record: Path | None) -> Iterator[str]:
        seconds = self._latest - self._began
        yield f"{ended} after {self.steps} step{'s' * (self.steps > 1)} in {seconds_text(seconds)}"
        if seconds > 0:
            yield f"{short(self.steps / seconds)} steps/s"
        if self.loss is not None:
            yield f"loss {short(self.loss)}"
        yield f"{bytes_text(self._bytes_sent / self.steps)}/step"
        yield f"{share_text(self._waiting_seconds / self._seconds if self._seconds else 0.0)} waiting"
        if record is not None:
            yield f"record: {record}"


class RecordFile:
    """A record that is rewritten while its session goes on, and the event log beside it, which goes with the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log_path = path.with_name(path.stem + LOG_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self._log_path, events.notice, anew=True)
        self._log = EventLog(self._put)
        self._tally: Tally | None = None
        self._began = self._next = 0.0  # moments: of attach, and of the next writing
        self._complained = False

    def hear(self, event: Event) -> None:
        self._log(event)
        if isinstance(event, Attached):
            self._began, self._next = event.moment, event.moment + 1.0
        elif self._tally is not None and event.moment >= self._next:
            began = time.perf_counter()
            self._write("interrupted")  # which is right if it stays so
            took, elapsed = time.perf_counter() - began, event.moment - self._began
            self._next = event.moment + max(min(elapsed, REWRITE_SECONDS), took / REWRITE_SHARE)

    def close(self, ended: Ended) -> Path | None:
        """Write the record; the path where that is done, None where there is nothing to write, or no room."""
        self._log.end()
        self._file.close()
        written = self._write(ended)
        if written or not self._complained:
            self._log_path.unlink(missing_ok=True)
        return self._path if written else None

    def _put(self, entry: Entry) -> None:
        self._file.append(entry)
        if entry["kind"] == "attached":
            self._tally = Tally(entry)
        elif self._tally is not None:
            self._tally.take(entry)

    def _write(self, ended: Ended) -> bool:
        if self._tally is None or not self._tally.took_part:
            return False
        try:
            records.write(self._path, records.merge([self._tally.record()], ended=ended))
        except OSError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            events.notice(
                f"the record could not be written to {self._path} ({error.strerror}). Training goes on; what was "
                f"logged is in {self._log_path}. `gossamer record {self._log_path}` makes the record of it."
            )


_reporter: Reporter | None = None  # of the newest session


def begin(*, lines: bool, record: Path | None) -> None:
    """Report the session that this process is about to attach; the one before it is over.

    lines: whether to show any, where nothing else listens, such as the recorder of `gossamer run`. Raises OSError where
    the record cannot be written.
    """
    global _reporter
    if _reporter is not None:
        _reporter.close()
        _reporter = None
    lines = lines and not events.observed()
    if lines or record is not None:
        _reporter = Reporter(lines=lines, record=record)
