"""Aside log: data outside a rank's record, as JSON lines: vitals, links, notices, warnings, errors, group changes.

Every line has its time in unix seconds, since many are written before a session begins. A thread samples vitals every
few seconds: a rank that is blocked still reports its machine, and a stopped one reports nothing.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, TextIO

from gossamer import events
from gossamer.base import flight_recorder
from gossamer.base.flight_recorder import NOTHING, FlightRecorder, NotedOperation
from gossamer.base.kernels.library import ABI, are_built
from gossamer.comm.runtime.uncaught_errors import summary_of
from gossamer.events import Event, GroupChanged, Joined, LinkCounters, LinksOpened, Noticed, ParametersDiffer, Skipped
from gossamer.observe.event_log import Entry, LineFile
from gossamer.observe.flight_dump import flight_path, write_flight
from gossamer.observe.vitals import CollectorClock, VitalsSampler, process_vitals
from gossamer.version import __version__

# -- activity ----------------------------------------------------------------------------------------------------------
# The current operation of a rank, sampled every few seconds, and reported if two samples find the same one.


class ActivityWatch:
    """Samples a flight recorder. clock: its seconds, time.perf_counter().

    law:    a rank with another operation at each sample only reports once that it trains
    """

    def __init__(self, recorder: FlightRecorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._recorder, self._clock = recorder, clock
        self._before: tuple[object, ...] = ()
        self._last_entry: tuple[object, ...] = ()

    def look(self) -> Entry | None:
        """The entry to report, if it is new. `seconds`: duration so far; `waits_for`: global ranks."""
        recorder = self._recorder
        waiting, latest, saving = recorder.waiting, recorder.latest, recorder.saving
        seen = (waiting, latest, latest.answered, saving)
        lasts, self._before = seen == self._before, seen
        state = "saving" if saving else "waiting" if lasts and waiting is not NOTHING else "training"
        at = (waiting if waiting is not NOTHING else latest) if lasts else NOTHING
        key = (state, at, waiting.waits_for if lasts else ())
        if key == self._last_entry or latest is NOTHING:
            return None
        self._last_entry = key
        return {"kind": "activity", "state": state, **(self._about(at, waiting is not NOTHING) if lasts else {})}

    def _about(self, at: NotedOperation, under_way: bool) -> dict[str, object]:
        rank, world = at.group
        since = at.began if under_way else at.answered or at.began
        return {
            "operation": at.name,
            "under_way": under_way,
            "number": at.number,
            "place": rank,
            "world": world,
            "step": at.step,
            "bucket": at.bucket,
            "buckets": self._recorder.buckets,
            "waits_for": list(at.waits_for) if under_way else [],
            "seconds": round(self._clock() - since, 3),
        }


# -- link watch --------------------------------------------------------------------------------------------------------
# Turns the counters of this worker's connections into rows, every few seconds, in the sampler's thread.
#
# A row is {process, round_trip, bytes_per_second, used_bytes, retransmits, through} of the connection to that process,
# since the row before, as measured at this end. through: the worker's process at the relay, as in LinksOpened; null for
# a direct connection. bytes_per_second is the throughput while the connection was busy. It is null if
# too few bytes were sent, since then the throughput is no measure of the capacity. If messages are shorter than the
# bandwidth-delay product, it measures round trips and not the link.

Row = dict[str, Any]
MOST_ROWS = 32  # per sample; more peers take turns


def full_rate(counters: LinkCounters, used_bytes: int, busy_seconds: float) -> float | None:
    """Bytes per second while the connection was busy, over these bytes; None if it was not saturated.

    It was saturated if the kernel does not report the rate of the latest flight as application-limited, and these bytes
    are more than one flight. The kernel's rate itself covers one round trip only, and varies with packet loss.
    """
    flight = counters.flight_bytes_per_second * counters.round_trip_seconds
    full = not counters.limited and 0 < flight <= used_bytes and busy_seconds > 0
    return used_bytes / busy_seconds if full else None


class LinkWatch:
    """Samples the connections of all groups. Any thread may add new ones."""

    def __init__(self) -> None:
        self._opened: list[tuple[LinksOpened, dict[str, LinkCounters]]] = []
        self._lock, self._turn = threading.Lock(), 0

    def opened(self, event: LinksOpened) -> list[Row]:
        """Rows of the measurement at the group's begin. Its bytes are reported with the next rows."""
        with self._lock:
            self._opened.append((event, {}))
        return [
            _row(process, event.round_trips[process] or None, rate, 0, 0, event.relays.get(process))
            for process, rate in event.bytes_per_second.items()
        ]

    def sample(self, *, last: bool = False) -> list[Row]:
        """Rows of connections that carried data; of all connections if they are closed or this is the last sample."""
        self._turn += 1
        found: list[Row] = []
        with self._lock:
            watched = list(self._opened)
        for event, before in watched:
            closed = not event.is_open()  # before reading: then the numbers read are final
            every = 1 if closed or last else ceil(len(before) / MOST_ROWS) or 1
            found += self._rows(event.read(), before, event.relays, every)
            if closed:
                with self._lock:
                    self._opened = [each for each in self._opened if each[0] is not event]
        return found

    def _rows(
        self,
        counted: Mapping[str, LinkCounters],
        before: dict[str, LinkCounters],
        relays: Mapping[str, str],
        every: int,
    ) -> list[Row]:
        found = []
        for place, (process, now) in enumerate(counted.items()):
            if (place + self._turn) % every:
                continue
            then = before.get(process)
            used = now.acknowledged_bytes - (then.acknowledged_bytes if then else 0)
            again = now.retransmits - (then.retransmits if then else 0)
            before[process] = now
            if used or again:
                rate = full_rate(now, used, now.busy_seconds - (then.busy_seconds if then else 0.0))
                found.append(_row(process, now.round_trip_seconds, rate, used, again, relays.get(process)))
        return found


def _row(process: str, round_trip: float | None, rate: float | None, used: int, again: int, through: str | None) -> Row:
    return {
        "process": process,
        "round_trip": None if round_trip is None else round(round_trip, 6),
        "bytes_per_second": None if rate is None else round(rate),
        "used_bytes": used,
        "retransmits": again,
        "through": through,
    }


VITALS_SECONDS = 2.0
MOST_WARNINGS = 200  # per process: warnings of every step are repetitions
MOST_CHARACTERS = 20_000  # per text


def aside_log_path(directory: Path, rank: int) -> Path:
    return directory / f"aside-{rank}.jsonl"


class AsideLog:
    """A listener that passes entries outside the record to `put`. clock: unix seconds."""

    def __init__(self, put: Callable[[Entry], None], clock: Callable[[], float] = time.time) -> None:
        self._put, self._clock = put, clock
        self._lock, self._pid = threading.RLock(), os.getpid()  # any thread, and a signal's handler within `_append`
        self._warnings, self._watch = 0, LinkWatch()
        self._takes: Mapping[type[Event], Callable[[Any], Entry]] = {
            Joined: lambda event: {"kind": "joined"},
            Noticed: lambda event: {"kind": "noticed", "message": event.message[:MOST_CHARACTERS]},
            LinksOpened: lambda event: {"kind": "links", "links": self._watch.opened(event)},
            Skipped: lambda event: _entry("skipped", event, "step", "rank", "tensor", "scaled", "batch"),
            ParametersDiffer: lambda event: _entry("parted", event, "when", "tensor", "held", "agreed"),
            GroupChanged: lambda event: _entry(
                "group changed", event, "step", "view", "world", "lost", "joined", "seconds", "finished"
            ),
        }

    def __call__(self, event: Event) -> None:
        take = self._takes.get(type(event))
        if take is not None:
            self._append(take(event))

    def begin(self) -> None:
        """Report the environment of a process at its begin."""
        self._append({"kind": "environment", "versions": rank_environment()})

    def warned(self, category: str, message: str, where: str) -> None:
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            text = message[:MOST_CHARACTERS]
            self._append({"kind": "warning", "category": category, "message": text, "where": where})

    def failed(self, error: BaseException, thread: str) -> None:
        """Report an uncaught error that ended a thread."""
        text = "".join(traceback.format_exception(error))[-MOST_CHARACTERS:]
        summary = summary_of(error)[:MOST_CHARACTERS]
        self._append({"kind": "uncaught", "thread": thread, "summary": summary, "traceback": text})

    def vitals(self, sampled: Mapping[str, float]) -> None:
        self._append({"kind": "vitals", "values": sampled})

    def active(self, activity: Entry) -> None:
        """Report the rank's activity, an entry of ActivityWatch."""
        self._append(activity)

    def links(self, *, last: bool = False) -> None:
        """Report the traffic of connections since the last call."""
        rows = self._watch.sample(last=last)
        if rows:
            self._append({"kind": "links", "links": rows})

    def _append(self, entry: Entry) -> None:
        if os.getpid() != self._pid:
            return  # a data loader's process, which may have been forked while the lock was held
        with self._lock:
            self._put({**entry, "moment": round(self._clock(), 6)})


def _entry(kind: str, event: Event, *names: str) -> Entry:
    return {"kind": kind, **{name: getattr(event, name) for name in names}}


class VitalsThread:
    """Samples vitals every `seconds` in a thread until it is closed, and once more at the end. `report`: gets them."""

    def __init__(
        self, sampler: VitalsSampler, report: Callable[[Mapping[str, float]], None], seconds: float = VITALS_SECONDS
    ) -> None:
        self._sampler, self._append, self._seconds = sampler, report, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer vitals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self._append(self._sampler.sample())
        self._append(self._sampler.sample())


class Aside:
    """Aside log of a worker of `gossamer run`: receives events, warnings, errors of threads, and vitals."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = LineFile(aside_log_path(directory, rank), lambda sentence: None)
        self.log = AsideLog(self._file.append)
        self.log.begin()
        collector = CollectorClock()
        self._ends = [
            events.subscribe(self.log, takes_steps=False),
            watch_warnings(self.log.warned),
            watch_threads(self.log.failed),
            collector.install(),
        ]
        self._flight = flight_path(directory, rank)
        self._activity = ActivityWatch(flight_recorder.current)
        self._vitals = VitalsThread(process_vitals(collector), self._sampled)

    def _sampled(self, sampled: Mapping[str, float]) -> None:
        self.log.vitals(sampled)
        self.log.links()
        activity = self._activity.look()
        if activity is not None:
            self.log.active(activity)
            if "operation" in activity:
                self._keep_flight()

    def _keep_flight(self) -> None:
        with suppress(OSError):  # a full disk: training does not need the file
            write_flight(self._flight, flight_recorder.current)

    def close(self) -> None:
        for end in self._ends:
            end()
        self._vitals.close()
        if flight_recorder.current.begun:
            self._keep_flight()
        self.log.links(last=True)
        self._file.close()


def watch_warnings(report: Callable[[str, str, str], None]) -> Callable[[], None]:
    """Pass category, message and place of Python's warnings to `report`; they are shown as before. Returns its undo."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        report(category.__name__, str(message), f"{filename}:{lineno}")
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show

    def end() -> None:
        if warnings.showwarning is show:  # otherwise another wrapper was installed
            warnings.showwarning = shown

    return end


def watch_threads(report: Callable[[BaseException, str], None]) -> Callable[[], None]:
    """Pass errors that end a thread to `report`; they are shown as before. Returns its undo."""
    shown = threading.excepthook

    def show(about: threading.ExceptHookArgs) -> None:
        if about.exc_value is not None:
            report(about.exc_value, about.thread.name if about.thread else "")
        shown(about)

    threading.excepthook = show

    def end() -> None:
        if threading.excepthook is show:
            threading.excepthook = shown

    return end


# -- versions, platform and settings of this process, for comparison between ranks -------------------------------------
# SETTINGS lists the environment variables that are reported. Others, such as a token, never are.

SETTINGS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "GLOO_SOCKET_IFNAME",
    "GOSSAMER_COLLECTIVE",
    "GOSSAMER_CONGESTION",
    "GOSSAMER_KERNELS",
    "GOSSAMER_SHARED_MEMORY",
    "GOSSAMER_THREADS",
    "GOSSAMER_TIMEOUT",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
MOST_SETTING_CHARACTERS = 200


def rank_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return descriptions by name, without unset variables. Versions of torch are included if it is imported."""
    return {
        "python": platform.python_version(),
        "gossamer": __version__,
        **_of_torch(),
        "kernels": f"compiled, ABI {ABI}" if are_built() else "plain torch",
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "byte order": sys.byteorder,
        "cores": str(os.cpu_count() or 1),
        **{name: variables[name][:MOST_SETTING_CHARACTERS] for name in SETTINGS if name in variables},
    }


def _of_torch() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["CUDA"] = str(torch.version.cuda)
    if torch.cuda.is_available() and hasattr(torch.cuda, "nccl"):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions
