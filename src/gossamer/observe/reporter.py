"""Reporter: shows progress and writes the record of rank 0's session without `gossamer run`.

Before a session is attached, it decides whether the launcher does so already, and starts the exporters.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from gossamer import events
from gossamer.base.run_files import RUN_DIRECTORY, RunFiles, Stage, current_attempt
from gossamer.base.units import bytes_text, seconds_text, share_text, short
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.runtime.open_sessions import LaterSessions
from gossamer.errors import AttachError
from gossamer.events import Attached, AttachRequest, Closed, Ended, Event, Joined, Logged, RecordOption, StepEnded
from gossamer.launcher.startup import StageMarks
from gossamer.observe import record as records
from gossamer.observe.control_sequences import without_controls
from gossamer.observe.event_log import LOG_SUFFIX, Entry, EventLog, LineFile, LiveLines, Recorder
from gossamer.observe.exporters import destination
from gossamer.observe.exporters.destination import Destination, RankPlace, read_destination, read_destinations
from gossamer.observe.live import Progress
from gossamer.observe.rank_record import Tally

# -- status line: in place on a terminal, now and then otherwise -------------------------------------------------------

PREFIX = "gossamer: "
FIRST_SECONDS = 2.0
TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0  # without a terminal: a file, a pipe, a notebook
ERASE = "\r\x1b[K"


def standard_error() -> TextIO:
    """The current sys.stderr: notebooks and tests replace it."""
    return sys.stderr


class StatusLine:
    """Shows no text before FIRST_SECONDS and limits its rate. A closed or full stream does not end training."""

    def __init__(self, began: float, stream: Callable[[], TextIO] = standard_error) -> None:
        self._stream = stream
        self._next = began + FIRST_SECONDS
        self._unfinished = False  # whether the last line is to be overwritten

    def is_due(self, moment: float) -> bool:
        return moment >= self._next

    def show(self, text: str, moment: float) -> None:
        if self._on_terminal():
            self._next = moment + TERMINAL_SECONDS
            self._write(f"{ERASE}{(PREFIX + text)[: shutil.get_terminal_size().columns - 1]}")
            self._unfinished = True
        else:
            self._next = moment + PLAIN_SECONDS
            self._write(f"{PREFIX}{text}\n")

    def print_line(self, sentence: str) -> None:
        """Write a permanent line."""
        self._write(f"{ERASE if self._unfinished else ''}{PREFIX}{without_controls(sentence)}\n")
        self._unfinished = False

    def leave(self) -> None:
        """End the line before other output."""
        if self._unfinished:
            self._write("\n")
            self._unfinished = False

    def _on_terminal(self) -> bool:
        try:
            return self._stream().isatty()
        except (AttributeError, ValueError):  # closed, or not a real stream
            return False

    def _write(self, text: str) -> None:
        with suppress(AttributeError, OSError, ValueError):
            stream = self._stream()
            stream.write(text)
            stream.flush()


REWRITE_SECONDS = 60.0  # longest interval between writes of a record during training; it doubles from the first
REWRITE_SHARE = 0.005  # maximum fraction of time spent writing


class Reporter:
    """Listener for one session of this process, until Closed or the interpreter's exit; or for two, as of a GAN, until
    the last one of them is closed.

    lines: whether to show lines. record: file of a record of this rank only, since other ranks may be lost at the end.
    It is rewritten during training, and an event log next to it has the last second, too.
    """

    def __init__(self, *, lines: bool, record: Path | None, stream: Callable[[], TextIO] = standard_error) -> None:
        self._lines = lines
        self._file = None if record is None else RecordFile(record)
        self._stream = stream
        self._progress = Progress()
        self._live = LiveLines(self._show_line)
        self._summary: Summary | None = None  # from attach to the end
        self._lock = threading.RLock()  # steps and notices may come from different threads; a full disk is a notice
        self._process, self._sessions = os.getpid(), LaterSessions()
        self._unsubscribe = events.subscribe(self, shows_notices=False)
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._file is not None:
                self._file.handle(event)
            self._live(event)
            self._take(event)

    @property
    def waits(self) -> bool:
        """Whether its session is attached and has made no step yet."""
        return self._summary is not None and not self._summary.steps

    @property
    def record(self) -> Path | None:
        """The file of the record; None without one."""
        return None if self._file is None else self._file.path

    def close(self, ended: Ended | None = None) -> None:
        """Show and write the end, once. Without `ended`, as at the interpreter's exit."""
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
                self._status.print_line(summary.text(ended, written))

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
            case Closed() if not self._sessions.train:
                self.close(event.ended)

    def _show_line(self, line: dict[str, Any]) -> None:
        sentence = self._progress.take(line)
        if not self._lines or self._summary is None:
            return
        if line["kind"] == "noticed":
            self._status.leave()  # the log shows the notice
        elif sentence:
            self._status.print_line(sentence)


class Summary:
    """Totals of a session for its closing line."""

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
    """A record that is rewritten during its session, and the event log next to it, removed with the final record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log_path = path.with_name(path.stem + LOG_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self._log_path, events.notice, truncate=True)
        self._log = EventLog(self._put)
        self._tally: Tally | None = None
        self._began = self._next = 0.0  # times of attach and of the next write
        self._complained = False

    def handle(self, event: Event) -> None:
        self._log(event)
        if isinstance(event, Attached):
            self._began, self._next = event.moment, event.moment + 1.0
        elif self._tally is not None and event.moment >= self._next:
            began = time.perf_counter()
            self._write("interrupted")  # correct if the process is killed now
            took, elapsed = time.perf_counter() - began, event.moment - self._began
            self._next = event.moment + max(min(elapsed, REWRITE_SECONDS), took / REWRITE_SHARE)

    def close(self, ended: Ended) -> Path | None:
        """Write the record. Return its path; None without a session or if it cannot be written."""
        self._log.end()
        self._file.close()
        written = self._write(ended)
        if written or not self._complained:
            self._log_path.unlink(missing_ok=True)
        return self.path if written else None

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
            records.write(self.path, records.merge([self._tally.record()], ended=ended))
        except OSError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            events.notice(
                f"the record could not be written to {self.path} ({error.strerror}). Training continues. The event "
                f"log is {self._log_path}; `gossamer record {self._log_path}` makes the record from it."
            )


# -- which session -----------------------------------------------------------------------------------------------------

RECORD, QUIET, LOG_TO = "GOSSAMER_RECORD", "GOSSAMER_QUIET", "GOSSAMER_LOG_TO"
_reporter: Reporter | None = None  # of the newest session


def register() -> None:
    """Report every session that this process attaches from now on."""
    events.report_sessions(begin_session)


def begin_session(request: AttachRequest) -> str:
    """Report the session that is about to be attached, and end the report of the session before it.

    Rank 0 shows its progress and writes its record, unless its launcher does. Every rank exports its numbers. A report
    without a step yet continues, with both sessions, if the new session names no other record and no destinations: a
    GAN attaches two sessions before its first step.

    Returns:
        The path of the record, or "".

    Raises:
        AttachError: the record cannot be written, or a destination is invalid.
    """
    _record_for_launcher()
    path, destinations = record_path(request.record), log_destinations(request.log_to)
    waiting = _reporter if _reporter is not None and _reporter.waits else None
    recorded, exported = None if waiting is None else waiting.record, destination.awaited()
    if (waiting or exported) and path in (None, recorded) and destinations in ((), exported):
        path = recorded
    else:
        _begin_report(request, path, destinations)
    if path is None and RUN_DIRECTORY in os.environ:
        path = Path(os.environ[RUN_DIRECTORY]).parent / "record.json"
    return str(path or "")


def _record_for_launcher() -> None:
    """Record the sessions of a process that a launched script started, such as by multiprocessing, in place of its
    worker: the worker's own listeners see only its own sessions."""
    directory, rank = os.environ.get(RUN_DIRECTORY), os.environ.get("RANK")
    if directory is None or rank is None or events.observed():
        return
    files = RunFiles(Path(directory))
    if files.newest_start(int(rank)) is None or files.has_reached(Stage.ATTACHED, int(rank)):
        return
    recorder = Recorder(files.directory, int(rank), steps_live=os.environ.get("LOCAL_RANK") == "0")
    marks = StageMarks(files, int(rank), current_attempt())
    marks(Joined())
    events.subscribe(recorder)
    events.subscribe(marks, takes_steps=False)
    atexit.register(lambda: recorder.close(failed=getattr(sys, "last_type", None) is not None))


def _begin_report(request: AttachRequest, path: Path | None, destinations: Sequence[Destination]) -> None:
    destination.end()
    if request.is_first:
        try:
            begin(lines=shows_lines(request.record, request.world), record=path)
        except OSError as error:
            raise AttachError(
                f"the record of this run would be written to {path}, which is not writable ({error.strerror}), so all "
                'logged numbers would be lost. Write another path, such as record="record.json".'
            ) from None
    destination.begin(destinations, RankPlace(_lasting_rank(request.rank), request.local_rank))


def begin(*, lines: bool, record: Path | None) -> None:
    """Show and record the session that is about to be attached, and end the report of the one before it.

    lines: whether to show lines; False if another listener does, such as the recorder of `gossamer run`. Raises OSError
    if the record cannot be written.
    """
    global _reporter
    if _reporter is not None:
        _reporter.close()
        _reporter = None
    lines = lines and not events.observed()
    if lines or record is not None:
        _reporter = Reporter(lines=lines, record=record)


def record_path(record: RecordOption) -> Path | None:
    """File of the record. The environment variable overrides the script; if empty, nothing is recorded."""
    written = os.environ.get(RECORD, record)
    if not written:
        return None
    if not isinstance(written, str | os.PathLike):
        raise AttachError(f'record={written!r} is not a file name. Write record="record.json".')
    return Path(written).absolute()


def shows_lines(record: RecordOption, world: int) -> bool:
    """Whether to show lines. One worker is as quiet as plain training, unless the variable is "0"."""
    quiet = os.environ.get(QUIET, "")
    return record is not False and (world > 1 if not quiet else quiet == "0")


def log_destinations(log_to: Iterable[str]) -> tuple[Destination, ...]:
    """Destinations of metrics. The environment variable overrides the script; if empty, nothing is exported."""
    text = os.environ.get(LOG_TO)
    texts = [log_to] if isinstance(log_to, str) else log_to
    try:
        return tuple(map(read_destination, texts)) if text is None else read_destinations(text)
    except ValueError as problem:
        raise AttachError(f"{LOG_TO if text is not None else 'log_to'}: {problem}") from None


def _lasting_rank(rank: int) -> int:
    """The rank; in an elastic run, which renumbers ranks, the number at the start of this worker."""
    return int(os.environ["RANK"]) if is_elastic() and "RANK" in os.environ else rank
