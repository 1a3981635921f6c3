"""Points of curves: logged metrics as they come, and the steps' own numbers as means over a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from gossamer.events import Attached, Event, GroupChanged, Logged, StepEnded

MERGED_SECONDS = 1.0  # of steps that are one point: a week of them stays a file that can be drawn
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
    """A tool that keeps curves."""

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


class CurveExporter:
    """Writes the points of events. Steps that end within a second are one point, with their means and the last step."""

    def __init__(self, writer: PointWriter) -> None:
        self._writer = writer
        self._steps: list[StepEnded] = []
        self._written = -float("inf")  # moment of the last point of steps

    def take(self, events: Sequence[Event]) -> None:
        points = [point for event in events for point in self._points(event)]
        if points:
            self._writer.write(points)

    def close(self) -> None:
        try:
            if self._steps:
                self._writer.write([self._merged()])
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
