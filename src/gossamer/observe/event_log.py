"""Event log: the events of one rank as lines of JSON, appended during training, so that a killed run keeps them.

One line per second has the steps and the logged metrics of that second; rare events have their own lines at once. A
step takes some ten bytes, a logged number some fifty, as in the record: a week at two steps per second, with a loss
each, is a file of 100 MB. `Recorder` also writes a few lines per second for the live view.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from gossamer import events
from gossamer.base import bounded_file, system
from gossamer.base.json_text import json_text, read_json
from gossamer.events import (
    Attached,
    Closed,
    CollectivePicked,
    ContributionsCounted,
    Event,
    LeftRun,
    Logged,
    Noticed,
    RecipeSwitched,
    ResidualMeasured,
    Saved,
    Skipped,
    StepEnded,
    TensorsMeasured,
)

Entry = dict[str, Any]
BATCH_SECONDS = 1.0
SINGLE_STEPS = 10  # first steps with an entry each: times per step exclude up to this many as warm-up
LOG_SUFFIX = ".events.jsonl"  # replaces a record's .json during training without a launcher
MOST_LOGGED = 10_000  # numbers or tensor hashes per line, half a megabyte
MOST_LINE_BYTES = 2**24  # of a line to read; a longer one counts as truncated
PENDING_BYTES = 2**24  # kept in memory while the disk is full
SUMMED = ("waiting_seconds", "encode_seconds", "wire_seconds", "decode_seconds", "bytes_sent", "bytes_pulled")


def event_log_path(directory: Path, rank: int) -> Path:
    return directory / f"events-{rank}.jsonl"


def truncated_path(directory: Path, rank: int) -> Path:
    """An empty file, which fits on a full disk. It means that the rank ended and its event log lacks the last lines."""
    return directory / f"truncated-{rank}"


class EventLog:
    """Turns a session's events into entries for `put`; steps and metrics are batched by second.

    interface_bytes: reads the counter of bytes sent by this worker's host, if there is one.
    """

    def __init__(self, put: Callable[[Entry], None], interface_bytes: Callable[[], int] | None = None) -> None:
        self._put = put
        self._interface_bytes = interface_bytes
        self._attached: Attached | None = None
        self._moment = self._flushed = 0.0  # times of the latest event and of the last batch
        self._count = 0  # steps of the session
        self._slow = False  # steps take longer than a batch, so each is written at once
        self._steps: Entry = {}
        self._logged: list[tuple[int, float, dict[str, float | None]]] = []
        self._numbers = 0  # in the batch
        # Called twice a step; functools.singledispatchmethod takes five microseconds
        self._takes: Mapping[type[Event], Callable[[Any], None]] = {
            StepEnded: self._step,
            Logged: self._log,
            Attached: self._attach,
            Saved: self._save,
            RecipeSwitched: self._switch,
            CollectivePicked: self._pick,
            ContributionsCounted: self._count_contributions,
            LeftRun: self._leave,
            ResidualMeasured: self._write_residual,
            TensorsMeasured: self._write_tensors,
            Closed: self._close,
        }

    def __call__(self, event: Event) -> None:
        if self._attached is not None or isinstance(event, Attached):
            self._moment = event.moment
            take = self._takes.get(type(event))
            if take is not None:
                take(event)

    def flush(self) -> None:
        """Put the batch since the last flush."""
        self._flushed = self._moment
        if self._steps:
            self._put_entry("steps", peak_resident_bytes=system.peak_resident_bytes(), **self._steps)
            self._steps = {}
        if self._logged:
            self._put_entry("logged", points=self._logged)
            self._logged, self._numbers = [], 0

    def end(self, failed: bool = False) -> None:
        """Log the end of the process. failed: whether training failed."""
        if self._attached is not None:
            self.flush()
            self._put_entry("end", failed=failed)

    def _attach(self, event: Attached) -> None:
        self.flush()
        self._attached, self._count = event, 0
        fields = ("rank", "world", "recipe", "parameters", "period")
        unix = round(time.time() + event.moment - time.perf_counter(), 6)  # wall-clock time, to compare ranks
        place = {"moment": unix, "host": socket.gethostname(), "pid": os.getpid()}
        self._put_entry("attached", **{name: getattr(event, name) for name in fields}, **place)

    def _step(self, event: StepEnded) -> None:
        self._count += 1
        steps = self._steps or {"seconds": [], "skipped_steps": 0, **dict.fromkeys(SUMMED, 0.0)}
        steps["step"] = event.step
        steps["seconds"].append(round(event.seconds, 7))
        steps["skipped_steps"] += event.skipped
        for name in SUMMED:
            steps[name] += getattr(event, name)
        if event.data_seconds:  # for the store; a record does not use it
            steps["data_seconds"] = round(steps.get("data_seconds", 0.0) + event.data_seconds, 6)
        if self._interface_bytes is not None:
            counted = self._interface_bytes()
            steps["counted"] = [steps.get("counted", [counted])[0], counted]
        self._steps = steps
        self._slow = event.seconds >= BATCH_SECONDS
        if self._count <= SINGLE_STEPS:
            self.flush()
        self._flush_if_due()

    def _log(self, event: Logged) -> None:
        values = {name: value if isfinite(value) else None for name, value in event.values.items()}
        self._logged.append((event.step, self._seconds(), values))
        self._numbers += len(values)
        if self._numbers >= MOST_LOGGED:
            self.flush()
        self._flush_if_due()

    def _save(self, event: Saved) -> None:
        self._at_once("saved", step=event.step, directory=event.directory)

    def _switch(self, event: RecipeSwitched) -> None:
        fields = {"before": event.before, "after": event.after, "reason": event.reason}
        self._at_once("switched", step=event.step, bytes_sent=event.bytes_sent, **fields)

    def _pick(self, event: CollectivePicked) -> None:
        self._at_once("collective", nbytes=event.nbytes, collective=event.collective, world=event.world)

    def _count_contributions(self, event: ContributionsCounted) -> None:
        ages = {str(age): count for age, count in sorted(event.staleness.items())}
        counts = {"applied": event.applied, "late": event.late, "samples": event.samples}
        self._at_once("servers", told={**counts, "staleness": ages})

    def _leave(self, event: LeftRun) -> None:
        self._at_once("left")

    def _write_residual(self, event: ResidualMeasured) -> None:
        norm = event.norm if isfinite(event.norm) else None
        self._at_once("residual", residual={"norm": norm, "step": event.step})

    def _write_tensors(self, event: TensorsMeasured) -> None:
        self._put_entry("tensors", step=event.step, tensors=[asdict(each) for each in event.tensors])

    def _close(self, event: Closed) -> None:
        fields = ("digest", "holds_merged", "residual_bytes", "bucket_bytes", "agrees", "differing")
        tensors = dict(event.tensors) if len(event.tensors) <= MOST_LOGGED else {}
        frozen = [*event.changed_frozen[:MOST_LOGGED]]
        values = {name: getattr(event, name) for name in fields}
        self._at_once("closed", step=event.steps, tensors=tensors, changed_frozen=frozen, **values)

    def _flush_if_due(self) -> None:
        if self._slow or self._moment - self._flushed >= BATCH_SECONDS:
            self.flush()

    def _at_once(self, kind: str, **content: Any) -> None:
        self.flush()
        self._put_entry(kind, **content)

    def _put_entry(self, kind: str, **content: Any) -> None:
        self._put({"kind": kind, "at": self._seconds(), **content})

    def _seconds(self) -> float:
        assert self._attached is not None
        return round(self._moment - self._attached.moment, 6)


class LineFile:
    """A file of lines, each passed to the system at once, so that no line is lost when this process ends.

    A full disk does not end training: refused lines are kept, up to 16 MB, and retried with every further line.

    Args:
        path: the file.
        complain: called once with a message about a full disk.
        `truncate`: truncate an existing file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, complain: Callable[[str], None], *, truncate: bool = False) -> None:
        self._path, self._complain = path, complain
        self._complained = self._given_up = self._writes = False
        self._pending = b"" if truncate or _ends_whole(path) else b"\n"
        how = os.O_TRUNC if truncate else os.O_APPEND
        self._file = system.open_file(path, os.O_WRONLY | os.O_CREAT | how, 0o666)

    def append(self, entry: Entry) -> None:
        if self._file.closed or self._given_up:
            return
        line = json_text(entry).encode() + b"\n"
        self._pending += line
        self._write()

    def close(self) -> bool:
        """Retry the pending lines and close the file. Return whether the file has all lines."""
        if not self._file.closed:
            self._write()
            self._file.close()
        return not self._pending and not self._given_up

    def _write(self) -> None:
        if self._writes:  # a signal's handler interrupted the loop below, which also writes its line
            return
        self._writes = True
        try:
            while self._pending:
                written = os.write(self._file.fileno(), self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            self._refused(error)
        finally:
            self._writes = False

    def _refused(self, error: OSError) -> None:
        if len(self._pending) > PENDING_BYTES:
            self._given_up, self._pending = True, b""
        if not self._complained:
            self._complained = True
            self._complain(
                f"{self._path} cannot be written ({error.strerror}), so this run's record may lack numbers. Training "
                "continues. Free some space: pending lines are retried."
            )


def _ends_whole(path: Path) -> bool:
    """Whether a file's last line is complete, so that another may follow."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_entry(line: bytes) -> Entry | None:
    """Parse a line; None for a line that is incomplete because its process was killed."""
    try:
        entry = read_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of an event log, in order, without incomplete lines."""
    for line in bounded_file.read_lines(path, MOST_LINE_BYTES):
        entry = read_entry(line)
        if entry is not None:
            yield entry


# -- the files of one rank: its event log, and lines for the live view -------------------------------------------------

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


@dataclass
class _Totals:
    """Sums over the steps of a session so far, in bytes and seconds."""

    steps_made: int = 0
    bytes_sent: float = 0.0
    waiting_seconds: float = 0.0
    step_seconds: float = 0.0

    def add(self, step: StepEnded) -> None:
        self.steps_made += 1
        self.bytes_sent += step.bytes_sent
        self.waiting_seconds += step.waiting_seconds
        self.step_seconds += step.seconds


class LiveLines:
    """Turns a session's events into the lines of a live view; `put` gets each as a dict."""

    def __init__(self, put: Callable[[dict[str, Any]], None], steps_live: bool = True) -> None:
        self._put = put
        self._steps_live = steps_live
        self._began = self._next = 0.0  # times of attach, and of the next line about a step
        self._totals = _Totals()
        self._latest: dict[str, float] = {}  # latest value of each metric
        self._takes: Mapping[type[Event], Callable[[Any], None]] = {
            StepEnded: self._step,
            Logged: self._log,
            Attached: self._attach,
            RecipeSwitched: self._switch,
            Skipped: self._skip,
            Noticed: self._notice,
            Saved: self._save,
        }

    def __call__(self, event: Event) -> None:
        take = self._takes.get(type(event))
        if take is not None:
            take(event)

    def _attach(self, event: Attached) -> None:
        self._began, self._totals, self._latest = event.moment, _Totals(), {}
        about = {"recipe": event.recipe, "workers": event.world, "parameters": event.parameters}
        self._put_entry("attached", **about, steps=event.steps, period=event.period)

    def _step(self, event: StepEnded) -> None:
        self._totals.add(event)
        if self._steps_live and event.moment >= self._next:
            self._next = event.moment + LIVE_SECONDS
            self._put_entry(
                "step",
                step=event.step,
                seconds=event.moment - self._began,
                **vars(self._totals),
                metrics=_finite(self._latest),
            )

    def _log(self, event: Logged) -> None:
        self._latest |= event.values

    def _switch(self, event: RecipeSwitched) -> None:
        self._put_entry("switched", recipe=event.after, period=event.period)

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
    return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}
