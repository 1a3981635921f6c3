"""Destinations of a run's metrics: text such as tensorboard:DIR, and its exporter on each rank.

Ranks are separate if the tool allows it: a run each in TensorBoard, a label in scraped and posted points, a file each
of JSON lines. Weights & Biases and MLflow receive rank 0 only, since a run there is a row in a table.

A tool cannot block or end a step. The training thread only puts events into a bounded queue; a thread takes them out
and calls the tool. Events that the tool refuses, or that arrive while the queue is full, are dropped and counted. The
user is notified once, and of the count at the end.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from gossamer import events
from gossamer.base.host_port import LOOPBACK, read_host_port
from gossamer.events import Attached, Closed, Event, GroupChanged, Logged, StepEnded
from gossamer.observe.exporters.otlp import OtlpExporter, metrics_url
from gossamer.observe.exporters.points import CurveExporter, JsonLinesWriter, MlflowWriter, WandbWriter

TAKEN = (Attached, StepEnded, Logged, GroupChanged)
ROOM = 100_000  # numbers in the queue: some 10 MB
LOOK_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0  # longest pause after failures of a tool; pauses double
CLOSE_SECONDS = 10.0  # for all tools together to take the rest


class Exporter(Protocol):
    """A tool, called by one thread. Both methods may raise any error.

    An exporter that keeps events between calls also has `unsent`, the number of events that it took and that its tool
    lacks.
    """

    def take(self, events: Sequence[Event], /) -> None: ...

    def close(self) -> None: ...


class ExportQueue:
    """A listener that queues events for a tool.

    Args:
        name: of the destination, in messages.
        open_exporter: called before the first events.
        room: capacity of the queue in numbers; an event counts one, and one for each of its metrics.
    """

    def __init__(self, name: str, open_exporter: Callable[[], Exporter], room: int = ROOM) -> None:
        self.dropped = 0  # events
        self._received = 0  # events
        self._name, self._open, self._room = name, open_exporter, room
        self._exporter: Exporter | None = None
        self._waiting: list[Event] = []
        self._numbers = 0  # numbers in the queue
        self._passing = 0  # events that the tool has not taken yet
        self._lock = threading.Lock()  # for the queue and its count; never held for anything else
        self._warned = False
        self._process = os.getpid()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, TAKEN) or os.getpid() != self._process:
            return
        numbers = _numbers(event)
        with self._lock:
            self._received += 1
            full = self._numbers + numbers > self._room
            if not full:
                self._waiting.append(event)
                self._numbers += numbers
        if full:
            self._drop(1, "it does not keep up")

    def pump(self) -> bool:
        """Pass the queued events to the tool. Return whether it took them."""
        try:
            if self._exporter is None and self._waiting:
                self._exporter = self._open()
        except BaseException as error:  # a tool may even call sys.exit; training continues
            self._warn(reason(error))
            return False
        batch = self._next()
        self._passing = len(batch)
        try:
            if self._exporter is not None and batch:
                self._exporter.take(batch)
        except BaseException as error:
            self._drop(len(batch) if self._unsent is None else 0, reason(error))
            return False
        finally:
            self._passing = 0
        return True

    def finish(self) -> None:
        """Pass the rest to the tool, and close it."""
        self.pump()
        self.dropped += len(self._next())
        try:
            if self._exporter is not None:
                self._exporter.close()
        except BaseException as error:
            self._warn(reason(error))

    def report_dropped(self) -> None:
        """Report the number of missing events at the end, if any."""
        in_tool = self._passing if self._unsent is None else self._unsent
        missing = self.dropped + in_tool + len(self._waiting)
        if missing:
            events.notice(f"{missing} of {self._received} events of this worker did not reach {self._name}.")

    @property
    def _unsent(self) -> int | None:
        """Events that the exporter took and its tool lacks; None if the exporter keeps none."""
        return getattr(self._exporter, "unsent", None)

    def _next(self) -> list[Event]:
        with self._lock:
            batch, self._waiting, self._numbers = self._waiting, [], 0
        return batch

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            events.notice(
                f"{self._name} refuses this worker's metrics ({why}). Training continues. The tool is retried, and "
                "events that do not fit into the queue meanwhile are dropped and counted."
            )


class ExportThread:
    """Pumps a queue until it is closed."""

    def __init__(self, queue: ExportQueue) -> None:
        self._queue = queue
        self._closing = threading.Event()
        self._unsubscribe = events.subscribe(queue, shows_notices=False)
        self._thread = threading.Thread(target=self._run, name="gossamer-export", daemon=True)
        self._thread.start()

    def ask_to_close(self) -> None:
        self._unsubscribe()
        self._closing.set()

    def wait(self, deadline: float) -> None:
        """Wait until the rest was taken, or until `deadline`, a time of time.monotonic()."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._queue.report_dropped()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closing.wait(pause):
            pause = LOOK_SECONDS if self._queue.pump() else min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._queue.finish()


def _numbers(event: Event) -> int:
    return 1 + len(event.values) if isinstance(event, Logged) else 1


def reason(error: BaseException) -> str:
    """A short description in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


# -- destinations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlace:
    """Rank of a process in the run and on its machine."""

    rank: int
    local_rank: int  # on its machine


Open = Callable[[str, RankPlace], Exporter]


@dataclass(frozen=True)
class Tool:
    """A kind of destination."""

    target: str  # placeholder of its target
    open: Open
    check: Callable[[str], object] = str  # raises ValueError for invalid targets
    every_rank: bool = True
    package: str = ""  # required package; the extra with the name of the kind installs it


@dataclass(frozen=True)
class Destination:
    """A tool and its target."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"

    @property
    def tool(self) -> Tool:
        return TOOLS[self.kind]

    def at(self, folder: Path) -> Destination:
        """The destination with a relative path resolved from `folder`, for a process in another directory."""
        return replace(self, target=str(folder / self.target)) if self.tool.target in ("DIR", "FILE") else self


def _tensorboard(folder: str, place: RankPlace) -> Exporter:
    from gossamer.observe.exporters.tensorboard import TensorBoardWriter  # needs an extra

    return CurveExporter(TensorBoardWriter(Path(folder) / f"rank-{place.rank}"))


def _json_lines(file: str, place: RankPlace) -> Exporter:
    return CurveExporter(JsonLinesWriter(rank_path(Path(file), place.rank), place.rank))


def rank_path(file: Path, rank: int) -> Path:
    """The file itself for rank 0, metrics-1.jsonl next to metrics.jsonl for rank 1."""
    return file if rank == 0 else file.with_name(f"{file.stem}-{rank}{file.suffix}")


def _prometheus(address: str, place: RankPlace) -> Exporter:
    from gossamer.observe.exporters.prometheus import PrometheusExporter  # needs an extra

    host, port = host_and_port(address)
    return PrometheusExporter(host, port + place.local_rank, {"rank": str(place.rank)})


def host_and_port(address: str) -> tuple[str, int]:
    """Parse PORT, on loopback, or HOST:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    try:
        return read_host_port(f"{host or LOOPBACK}:{port}")
    except ValueError:
        raise ValueError("write a port, such as 9400, or HOST:PORT, such as 0.0.0.0:9400") from None


def _otlp(endpoint: str, place: RankPlace) -> Exporter:
    about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "gossamer"), "host.name": socket.gethostname()}
    about["service.instance.id"] = f"{socket.gethostname()}-{os.getpid()}"
    return OtlpExporter(metrics_url(endpoint), place.rank, about)


TOOLS = {
    "tensorboard": Tool("DIR", _tensorboard, package="tensorboardX"),
    "wandb": Tool("PROJECT", lambda project, _: CurveExporter(WandbWriter(project)), every_rank=False, package="wandb"),
    "mlflow": Tool("URI", lambda uri, _: CurveExporter(MlflowWriter(uri)), every_rank=False, package="mlflow"),
    "prometheus": Tool("PORT", _prometheus, check=host_and_port, package="prometheus_client"),
    "otlp": Tool("ENDPOINT", _otlp, check=metrics_url),
    "jsonl": Tool("FILE", _json_lines),
}
FORMS = ", ".join(f"{kind}:{tool.target}" for kind, tool in TOOLS.items())
_BETWEEN = re.compile(f",(?=(?:{'|'.join(TOOLS)}):)")


def read_destination(text: str) -> Destination:
    """Parse KIND:TARGET. Raises ValueError."""
    kind, _, target = text.partition(":")
    if kind not in TOOLS or not target:
        raise ValueError(f"{text!r} is not a destination. Write one of {FORMS}, such as tensorboard:runs/tensorboard")
    try:
        TOOLS[kind].check(target)
    except ValueError as problem:
        raise ValueError(f"invalid target {target!r} in {text!r}: {problem}") from None
    package = TOOLS[kind].package
    if package and find_spec(package) is None:
        raise ValueError(
            f"{text!r} needs the package {package}, which {sys.executable} cannot import. Write: "
            f'{sys.executable} -m pip install "gossamer[{kind}]"'
        )
    return Destination(kind, target)


def read_destinations(text: str) -> tuple[Destination, ...]:
    """Parse several with commas between them, as in GOSSAMER_LOG_TO. Raises ValueError."""
    return tuple(map(read_destination, _BETWEEN.split(text))) if text else ()


class Exports:
    """All exports of one session of this process. They end with it, or with the interpreter."""

    def __init__(self, destinations: Sequence[Destination], place: RankPlace) -> None:
        from gossamer.comm.runtime.open_sessions import LaterSessions  # with torch, which a command's help does without

        received = [each for each in destinations if each.tool.every_rank or place.rank == 0]
        self._destinations = tuple(destinations)
        self._waits = False  # from attach to the first step
        self._process, self._sessions = os.getpid(), LaterSessions()
        self._threads = [
            ExportThread(ExportQueue(str(each), partial(each.tool.open, each.target, place))) for each in received
        ]
        self._unsubscribe = events.subscribe(self._handle, shows_notices=False)  # after the queues: it ends them
        atexit.register(self.close)

    @property
    def awaited(self) -> tuple[Destination, ...]:
        """The destinations, from attach to the first step; else none."""
        return self._destinations if self._waits else ()

    def close(self) -> None:
        """Pass the rest to all tools, for at most ten seconds; once."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._unsubscribe()
        self._unsubscribe = lambda: None
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.ask_to_close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.wait(deadline)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Attached | StepEnded | Closed):
            self._waits = isinstance(event, Attached)
        if isinstance(event, Closed) and not self._sessions.train:
            self.close()


_exports: Exports | None = None  # of the newest session


def end() -> None:
    """End the exports of the last session."""
    global _exports
    if _exports is not None:
        _exports.close()
        _exports = None


def awaited() -> tuple[Destination, ...]:
    """The destinations of a session without a step yet; else none."""
    return () if _exports is None else _exports.awaited


def begin(destinations: Sequence[Destination], place: RankPlace) -> None:
    """Export the session that this process is about to attach."""
    global _exports
    end()
    if destinations:
        _exports = Exports(destinations, place)
