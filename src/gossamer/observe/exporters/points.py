"""Points of curves, and tools with a history: JSON lines, Weights & Biases, MLflow.

Logged metrics are points of their own; the numbers of steps are averaged over a second. TensorBoard's writer is in
`tensorboard`, which imports the library at once.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Protocol

from gossamer.base import system
from gossamer.events import Attached, Event, GroupChanged, Logged, StepEnded

MERGED_SECONDS = 1.0  # of steps per point, so that a week of points can be drawn
STEP_CURVES = {
    "gossamer/step_seconds": "seconds",
    "gossamer/waiting_seconds": "waiting_seconds",
    "gossamer/encode_seconds": "encode_seconds",
    "gossamer/wire_seconds": "wire_seconds",
    "gossamer/decode_seconds": "decode_seconds",
    "gossamer/bytes_sent": "bytes_sent",
    "gossamer/bytes_pulled": "bytes_pulled",
}
assert set(STEP_CURVES.values()) <= {field.name for field in fields(StepEnded)}


@dataclass(frozen=True)
class Point:
    """Values of curves, by name, after `step` steps."""

    at: float  # unix seconds
    step: int
    values: Mapping[str, float]


class PointWriter(Protocol):
    """A tool that stores curves."""

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


class CurveExporter:
    """Writes the points of events. Steps within a second are one point, with their means and the last step."""

    def __init__(self, writer: PointWriter) -> None:
        self._writer = writer
        self._steps: list[StepEnded] = []
        self._written = -float("inf")  # time of the last point of steps
        self.unsent = 0  # events that it took and the tool lacks, of failed writes or waiting for the next point

    def take(self, events: Sequence[Event]) -> None:
        self.unsent += len(events)
        held = len(self._steps) + len(events)
        points = [point for event in events for point in self._points(event)]
        if points:
            self._writer.write(points)
            self.unsent -= held - len(self._steps)

    def close(self) -> None:
        try:
            if self._steps:
                held = len(self._steps)
                self._writer.write([self._merged()])
                self.unsent -= held
        finally:
            self._writer.close()

    def _points(self, event: Event) -> Iterator[Point]:
        match event:
            case StepEnded():
                self._steps.append(event)
                if event.moment - self._written >= MERGED_SECONDS:
                    yield self._merged()
            case Logged():
                yield Point(unix_seconds(event.moment), event.step, dict(event.values))
            case Attached():
                yield Point(unix_seconds(event.moment), 0, {"gossamer/workers": event.world})
            case GroupChanged():
                yield Point(unix_seconds(event.moment), event.step, {"gossamer/workers": event.world})

    def _merged(self) -> Point:
        steps, self._steps = self._steps, []
        self._written = steps[-1].moment
        values = {name: sum(getattr(step, field) for step in steps) / len(steps) for name, field in STEP_CURVES.items()}
        skipped = sum(step.skipped for step in steps)
        return Point(unix_seconds(steps[-1].moment), steps[-1].step, {**values, "gossamer/skipped_steps": skipped})


def unix_seconds(moment: float) -> float:
    """A moment of this process's time.perf_counter() on the clock on the wall."""
    return time.time() - time.perf_counter() + moment


# -- JSON lines --------------------------------------------------------------------------------------------------------


class RecordsFile:
    """Makes the folders above it. One process writes it. Raises OSError; the next append may then do better."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = system.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.bytes = os.fstat(self._file.fileno()).st_size

    def append(self, records: bytes) -> None:
        try:
            system.write_all(self._file, records)
        except OSError:
            with suppress(OSError):
                self._file.truncate(self.bytes)  # or readers would stop at the torn record for good
            raise
        self.bytes += len(records)

    def ends_with(self, end: bytes) -> bool:
        return system.read_at(self._file.fileno(), len(end), max(0, self.bytes - len(end))) == end

    def close(self) -> None:
        self._file.close()


class JsonLinesWriter:
    """Appends an object per point, {"at": unix seconds, "rank": 0, "step": 12, "values": {"loss": 0.5}}, to the file.

    A non-finite value is null, since JSON has no number for it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = RecordsFile(path)

    def write(self, points: Sequence[Point]) -> None:
        torn = self._file.bytes and not self._file.ends_with(b"\n")  # the previous process was killed
        self._file.append(b"\n" * bool(torn) + b"".join(map(self._line, points)))

    def close(self) -> None:
        self._file.close()

    def _line(self, point: Point) -> bytes:
        values = {name: value if isfinite(value) else None for name, value in point.values.items()}
        line = {"at": round(point.at, 6), "rank": self._rank, "step": point.step, "values": values}
        return json.dumps(line).encode() + b"\n"


# -- W&B ---------------------------------------------------------------------------------------------------------------


WANDB_STEP = "gossamer/step"


class WandbWriter:
    """Writes to Weights & Biases. project: PROJECT or ENTITY/PROJECT; other settings are W&B's: WANDB_API_KEY, ...

    The step is a separate metric, because W&B drops values for a step before the last one.
    """

    def __init__(self, project: str) -> None:
        wandb = import_module("wandb")
        entity, _, name = project.rpartition("/")
        # A run of the script stays separate; output of workers is captured by the launcher
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(entity=entity or None, project=name, reinit="create_new", settings=settings)
        self._run.define_metric("*", step_metric=WANDB_STEP)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, WANDB_STEP: point.step})

    def close(self) -> None:
        self._run.finish()


# -- MLflow ------------------------------------------------------------------------------------------------------------


AT_ONCE = 1000  # metrics, MLflow's limit
LONGEST = 250  # characters of a name, MLflow's limit
EXPERIMENT = "gossamer"  # without MLFLOW_EXPERIMENT_NAME


class MlflowWriter:
    """Writes to MLflow. uri: as MLFLOW_TRACKING_URI. Characters that MLflow rejects in names become underscores."""

    def __init__(self, uri: str) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment).info.run_id

    def write(self, points: Sequence[Point]) -> None:
        metric = self._mlflow.entities.Metric
        metrics = iter(
            [
                metric(mlflow_name(name), value, int(point.at * 1000), point.step)
                for point in points
                for name, value in point.values.items()
            ]
        )
        while batch := list(islice(metrics, AT_ONCE)):
            self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def mlflow_name(name: str) -> str:
    """A valid name: MLflow treats names as paths, which must have no empty or parent parts."""
    clean = re.sub(r"[^\w\-./: ]", "_", name, flags=re.ASCII)[:LONGEST]
    parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in clean.split("/")]
    return "/".join(parts)
