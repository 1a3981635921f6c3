"""Aside log: what belongs into no record of a rank, as JSON lines: vitals, links, notices, warnings, errors, changes.

Every line has its moment in unix seconds, since much of it comes before a session begins. Vitals are sampled by a
thread, every few seconds: a rank that is stuck still tells of its machine, and one that is stopped tells nothing.
"""

from __future__ import annotations

import os
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
from gossamer.comm.environment.rank_environment import rank_environment
from gossamer.events import Event, GroupChanged, Joined, LinkCounters, LinksOpened, Noticed, Parted, Skipped
from gossamer.observe.event_log import Entry, LineFile
from gossamer.observe.flight_dump import flight_path, write_flight
from gossamer.observe.vitals import CollectorClock, VitalsSampler, process_vitals

# -- activity ----------------------------------------------------------------------------------------------------------
# What a rank is at, looked at every few seconds, and told once it lasts from one look to the next.


class ActivityWatch:
    """Looks at a flight recorder. clock: its seconds, of time.perf_counter().

    law:    a rank whose looks find it at another operation each time tells nothing but that it trains, once
    """

    def __init__(self, recorder: FlightRecorder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._recorder, self._clock = recorder, clock
        self._before: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()

    def look(self) -> Entry | None:
        """What is to be told, if it is new. `seconds`: for how long; `waits_for`: ranks of the whole run."""
        recorder = self._recorder
        waiting, latest, saving = recorder.waiting, recorder.latest, recorder.saving
        seen = (waiting, latest, latest.answered, saving)
        lasts, self._before = seen == self._before, seen
        state = "saving" if saving else "waiting" if lasts and waiting is not NOTHING else "training"
        at = (waiting if waiting is not NOTHING else latest) if lasts else NOTHING
        key = (state, at, waiting.waits_for if lasts else ())
        if key == self._told or latest is NOTHING:
            return None
        self._told = key
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
# A row is {process, round_trip, bytes_per_second, used_bytes, retransmits}: of the connection to that process, as this
# end saw it since its row before. bytes_per_second is what the connection carried while it was busy; None where it had
# too little to carry, since that pace says nothing of what it could. Where messages are shorter than what the line
# holds in a round trip, it is the pace of round trips and not of the line.

Row = dict[str, Any]
MOST_ROWS = 32  # of one sample: with more peers each has its turn less often


def full_rate(counters: LinkCounters, used_bytes: int, busy_seconds: float) -> float | None:
    """Bytes a second while the connection was busy, over these bytes; None where it was not full.

    It was where the kernel's rate of the latest flight is not for want of data, and no older than these bytes: they are
    more than one flight. That rate itself is of a round trip only, and where packets are lost a matter of chance.
    """
    flight = counters.flight_bytes_per_second * counters.round_trip_seconds
    full = not counters.limited and 0 < flight <= used_bytes and busy_seconds > 0
    return used_bytes / busy_seconds if full else None


class LinkWatch:
    """Samples all groups' connections. Any thread may tell of new ones."""

    def __init__(self) -> None:
        self._opened: list[tuple[LinksOpened, dict[str, LinkCounters]]] = []
        self._lock, self._turn = threading.Lock(), 0

    def opened(self, event: LinksOpened) -> list[Row]:
        """Rows of what was measured as the group began. The bytes that this took are told with the next ones."""
        with self._lock:
            self._opened.append((event, {}))
        return [
            _row(process, event.round_trips[process] or None, rate, 0, 0)
            for process, rate in event.bytes_per_second.items()
        ]

    def sample(self, *, last: bool = False) -> list[Row]:
        """Rows of connections that carried something; of all at once where they are closed, or nothing follows."""
        self._turn += 1
        found: list[Row] = []
        with self._lock:
            watched = list(self._opened)
        for event, before in watched:
            closed = not event.is_open()  # asked first: what is read then are the last numbers
            found += self._rows(event.read(), before, every=1 if closed or last else ceil(len(before) / MOST_ROWS) or 1)
            if closed:
                with self._lock:
                    self._opened = [each for each in self._opened if each[0] is not event]
        return found

    def _rows(self, counted: Mapping[str, LinkCounters], before: dict[str, LinkCounters], every: int) -> list[Row]:
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
                found.append(_row(process, now.round_trip_seconds, rate, used, again))
        return found


def _row(process: str, round_trip: float | None, rate: float | None, used: int, again: int) -> Row:
    return {
        "process": process,
        "round_trip": None if round_trip is None else round(round_trip, 6),
        "bytes_per_second": None if rate is None else round(rate),
        "used_bytes": used,
        "retransmits": again,
    }


VITALS_SECONDS = 2.0
MOST_WARNINGS = 200  # of a process: a loop that warns in every step says nothing new
MOST_CHARACTERS = 20_000  # of one text


def aside_log_path(directory: Path, rank: int) -> Path:
    return directory / f"aside-{rank}.jsonl"


class AsideLog:
    """A listener that tells `put` what a record leaves out. clock: unix seconds."""

    def __init__(self, put: Callable[[Entry], None], clock: Callable[[], float] = time.time) -> None:
        self._put, self._clock = put, clock
        self._lock, self._pid = threading.Lock(), os.getpid()  # notices and warnings come from any thread
        self._warnings, self._watch = 0, LinkWatch()
        self._takes: Mapping[type[Event], Callable[[Any], Entry]] = {
            Joined: lambda event: {"kind": "joined"},
            Noticed: lambda event: {"kind": "noticed", "message": event.message[:MOST_CHARACTERS]},
            LinksOpened: lambda event: {"kind": "links", "links": self._watch.opened(event)},
            Skipped: lambda event: _entry("skipped", event, "step", "rank", "tensor", "scaled", "batch"),
            Parted: lambda event: _entry("parted", event, "when", "tensor", "held", "agreed"),
            GroupChanged: lambda event: _entry(
                "group changed", event, "step", "view", "world", "lost", "joined", "seconds", "finished"
            ),
        }

    def __call__(self, event: Event) -> None:
        take = self._takes.get(type(event))
        if take is not None:
            self._tell(take(event))

    def begin(self) -> None:
        """A process begins: what it runs on."""
        self._tell({"kind": "environment", "versions": rank_environment()})

    def warned(self, category: str, message: str, where: str) -> None:
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            text = message[:MOST_CHARACTERS]
            self._tell({"kind": "warning", "category": category, "message": text, "where": where})

    def failed(self, error: BaseException, thread: str) -> None:
        """An error that nothing caught has ended a thread."""
        text = "".join(traceback.format_exception(error))[-MOST_CHARACTERS:]
        summary = traceback.format_exception_only(error)[-1].strip()[:MOST_CHARACTERS]
        self._tell({"kind": "uncaught", "thread": thread, "summary": summary, "traceback": text})

    def vitals(self, sampled: Mapping[str, float]) -> None:
        self._tell({"kind": "vitals", "values": sampled})

    def active(self, activity: Entry) -> None:
        """What the rank is at, as ActivityWatch tells it."""
        self._tell(activity)

    def links(self, *, last: bool = False) -> None:
        """What connections have carried since before."""
        rows = self._watch.sample(last=last)
        if rows:
            self._tell({"kind": "links", "links": rows})

    def _tell(self, entry: Entry) -> None:
        if os.getpid() != self._pid:
            return  # a loader's process, which may have been forked while the lock was held
        with self._lock:
            self._put({**entry, "moment": round(self._clock(), 6)})


def _entry(kind: str, event: Event, *names: str) -> Entry:
    return {"kind": kind, **{name: getattr(event, name) for name in names}}


class VitalsThread:
    """Samples vitals every `seconds` in a thread, and hands them on, until it is closed; then once more."""

    def __init__(
        self, sampler: VitalsSampler, tell: Callable[[Mapping[str, float]], None], seconds: float = VITALS_SECONDS
    ) -> None:
        self._sampler, self._tell, self._seconds = sampler, tell, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer vitals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self._tell(self._sampler.sample())
        self._tell(self._sampler.sample())


class Aside:
    """All that a worker of `gossamer run` tells aside: hears events, warnings, errors of threads, and vitals."""

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
        with suppress(OSError):  # a full disk: nothing that training needs
            write_flight(self._flight, flight_recorder.current)

    def close(self) -> None:
        for end in self._ends:
            end()
        self._vitals.close()
        if flight_recorder.current.begun:
            self._keep_flight()
        self.log.links(last=True)
        self._file.close()


def watch_warnings(tell: Callable[[str, str, str], None]) -> Callable[[], None]:
    """Have category, message and place of Python's warnings told, which are shown as before; returns the end."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        tell(category.__name__, str(message), f"{filename}:{lineno}")
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show

    def end() -> None:
        if warnings.showwarning is show:  # else somebody has put another one around it
            warnings.showwarning = shown

    return end


def watch_threads(tell: Callable[[BaseException, str], None]) -> Callable[[], None]:
    """Have errors told that end a thread, which are shown as before; returns the end."""
    shown = threading.excepthook

    def show(about: threading.ExceptHookArgs) -> None:
        if about.exc_value is not None:
            tell(about.exc_value, about.thread.name if about.thread else "")
        shown(about)

    threading.excepthook = show

    def end() -> None:
        if threading.excepthook is show:
            threading.excepthook = shown

    return end
