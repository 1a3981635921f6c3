"""Destinations of a run's numbers: text such as tensorboard:DIR, and what it opens on each rank.

Ranks are told apart where the tool can: TensorBoard has a run for each, scraped and posted points a label, lines of
JSON a file for each. Weights & Biases and MLflow hear rank 0 alone, since a run there is a row in a table.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gossamer import events
from gossamer.events import Closed, Event
from gossamer.observe.exporters.export_queue import CLOSE_SECONDS, Exporter, ExportQueue, ExportThread
from gossamer.observe.exporters.json_lines import JsonLinesWriter
from gossamer.observe.exporters.mlflow_run import MlflowWriter
from gossamer.observe.exporters.otlp import OtlpExporter, metrics_url
from gossamer.observe.exporters.points import CurveExporter
from gossamer.observe.exporters.prometheus import PrometheusExporter
from gossamer.observe.exporters.tensorboard import TensorBoardWriter
from gossamer.observe.exporters.wandb_run import WandbWriter

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankPlace:
    """Which worker a process is."""

    rank: int
    local_rank: int  # among those of its machine


Open = Callable[[str, RankPlace], Exporter]


@dataclass(frozen=True)
class Tool:
    """A kind of destination."""

    target: str  # what is written after its name
    open: Open
    check: Callable[[str], object] = str  # raises ValueError for targets that can be seen to be wrong
    every_rank: bool = True
    package: str = ""  # that it needs, also the name of the extra


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
        """With a target that is a path taken from `folder`, for a process that may work elsewhere."""
        return replace(self, target=str(folder / self.target)) if self.tool.target in ("DIR", "FILE") else self


def _tensorboard(folder: str, place: RankPlace) -> Exporter:
    return CurveExporter(TensorBoardWriter(Path(folder) / f"rank-{place.rank}"))


def _json_lines(file: str, place: RankPlace) -> Exporter:
    return CurveExporter(JsonLinesWriter(rank_path(Path(file), place.rank), place.rank))


def rank_path(file: Path, rank: int) -> Path:
    """The file itself for rank 0, metrics-1.jsonl beside metrics.jsonl for rank 1."""
    return file if rank == 0 else file.with_name(f"{file.stem}-{rank}{file.suffix}")


def _prometheus(address: str, place: RankPlace) -> Exporter:
    host, port = host_and_port(address)
    return PrometheusExporter(host, port + place.local_rank, {"rank": str(place.rank)})


def host_and_port(address: str) -> tuple[str, int]:
    """PORT, on loopback, or HOST:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) < 2**16:
        raise ValueError("it is no port, such as 9400, or HOST:PORT, such as 0.0.0.0:9400")
    return host or LOOPBACK, int(port)


def _otlp(endpoint: str, place: RankPlace) -> Exporter:
    about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "gossamer"), "host.name": socket.gethostname()}
    about["service.instance.id"] = f"{socket.gethostname()}-{os.getpid()}"
    return OtlpExporter(metrics_url(endpoint), place.rank, about)


TOOLS = {
    "tensorboard": Tool("DIR", _tensorboard),
    "wandb": Tool("PROJECT", lambda project, _: CurveExporter(WandbWriter(project)), every_rank=False, package="wandb"),
    "mlflow": Tool("URI", lambda uri, _: CurveExporter(MlflowWriter(uri)), every_rank=False, package="mlflow"),
    "prometheus": Tool("PORT", _prometheus, check=host_and_port),
    "otlp": Tool("ENDPOINT", _otlp, check=metrics_url),
    "jsonl": Tool("FILE", _json_lines),
}
FORMS = ", ".join(f"{kind}:{tool.target}" for kind, tool in TOOLS.items())
_BETWEEN = re.compile(f",(?=(?:{'|'.join(TOOLS)}):)")


def read_destination(text: str) -> Destination:
    """Read KIND:TARGET. Raises ValueError."""
    kind, _, target = text.partition(":")
    if kind not in TOOLS or not target:
        raise ValueError(f"{text!r} is no place to log to. Write one of {FORMS}, such as tensorboard:runs/tensorboard")
    try:
        TOOLS[kind].check(target)
    except ValueError as problem:
        raise ValueError(f"{target!r} cannot be meant by {text!r}: {problem}") from None
    package = TOOLS[kind].package
    if package and find_spec(package) is None:
        raise ValueError(
            f"{text!r} needs the package {package}, which {sys.executable} does not find. Write: "
            f"{sys.executable} -m pip install {package}"
        )
    return Destination(kind, target)


def read_destinations(text: str) -> tuple[Destination, ...]:
    """Read several with commas between them, as GOSSAMER_LOG_TO holds them. Raises ValueError."""
    return tuple(map(read_destination, _BETWEEN.split(text))) if text else ()


class Exports:
    """All exports of a session of this process's, which end with it, or with the interpreter."""

    def __init__(self, destinations: Sequence[Destination], place: RankPlace) -> None:
        heard = [each for each in destinations if each.tool.every_rank or place.rank == 0]
        self._process = os.getpid()
        self._threads = [
            ExportThread(ExportQueue(str(each), partial(each.tool.open, each.target, place))) for each in heard
        ]
        self._unsubscribe = events.subscribe(self._hear, shows_notices=False)  # after the queues: it ends them
        atexit.register(self.close)

    def close(self) -> None:
        """Let all tools take what is left, for ten seconds at most; once."""
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

    def _hear(self, event: Event) -> None:
        if isinstance(event, Closed):
            self.close()


_exports: Exports | None = None  # of the newest session


def end() -> None:
    """The session before is over."""
    global _exports
    if _exports is not None:
        _exports.close()
        _exports = None


def begin(destinations: Sequence[Destination], place: RankPlace) -> None:
    """Export the session that this process is about to attach."""
    global _exports
    end()
    if destinations:
        _exports = Exports(destinations, place)
