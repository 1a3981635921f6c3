"""Recorder: listens to one rank's events, keeps its numbers, and writes a few live lines a second."""

from __future__ import annotations

import json
import resource
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.events import (
    Attached,
    Closed,
    CollectivePicked,
    Event,
    Logged,
    Noticed,
    Saved,
    ServersTold,
    Skipped,
    StepEnded,
)
from gossamer.observe.record import Point, RankRecord, write_rank

LIVE_SECONDS = 0.1
TIMES = ("seconds", "waiting_seconds", "encode_seconds", "wire_seconds", "decode_seconds")


def live_path(directory: Path, rank: int) -> Path:
    return directory / f"live-{rank}.jsonl"


def warm_up(steps: int) -> int:
    """How many of the first steps are left out of times per step: ten, or a fifth of fewer than fifty."""
    return 10 if steps >= 50 else steps // 5


def peak_resident_bytes() -> int:
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


@dataclass
class Tally:
    """Running totals of one session."""

    attached: Attached
    times: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in TIMES})  # by step
    steps: int = 0
    skipped_steps: int = 0
    bytes_sent: float = 0.0
    bytes_pulled: float = 0.0
    counted: list[int] = field(default_factory=list)  # by the interface, after the first and the last step
    last_moment: float = 0.0  # of any event
    latest: dict[str, float] = field(default_factory=dict)  # value of each metric
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    closed: Closed | None = None
    servers: ServersTold | None = None
    collectives: dict[str, str] = field(default_factory=dict)

    def add(self, ended: StepEnded) -> None:
        for name, values in self.times.items():
            values.append(getattr(ended, name))
        self.steps = ended.step
        self.skipped_steps += ended.skipped
        self.bytes_sent += ended.bytes_sent
        self.bytes_pulled += ended.bytes_pulled

    @property
    def took_part(self) -> bool:
        return self.closed is not None or bool(self.times["seconds"] or self.metrics)

    def pick(self, nbytes: str, collective: str) -> None:
        """One size may go several ways: of numbers of unlike formats, or in other groups."""
        before = self.collectives.get(nbytes, "")
        if collective not in before:
            self.collectives[nbytes] = f"{before}, {collective}" if before else collective

    def count(self, counter: int) -> None:
        """Keep an interface's first counter and its last."""
        self.counted[1:] = [counter]

    def record(self) -> RankRecord:
        count = len(self.times["seconds"])
        kept = {name: np.array(values)[warm_up(count) :] for name, values in self.times.items()}
        means = {name: float(values.mean()) if count else 0.0 for name, values in kept.items()}
        median = float(np.median(by_period(kept["seconds"], self.attached.period))) if count else 0.0
        p90 = float(np.quantile(kept["seconds"], 0.9)) if count else 0.0
        return RankRecord(
            rank=self.attached.rank,
            world=self.attached.world,
            recipe=self.attached.recipe,
            parameters=self.attached.parameters,
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            seconds=self.last_moment - self.attached.moment,
            median_seconds=median,
            p90_seconds=p90,
            compute_seconds=means["seconds"] - means["waiting_seconds"],
            waiting_seconds=means["waiting_seconds"],
            encode_seconds=means["encode_seconds"],
            wire_seconds=means["wire_seconds"],
            decode_seconds=means["decode_seconds"],
            bytes_sent=self.bytes_sent / max(count, 1),
            bytes_pulled=self.bytes_pulled / max(count, 1),
            interface_bytes=(self.counted[1] - self.counted[0]) / (count - 1) if len(self.counted) == 2 else None,
            residual_bytes=self.closed.residual_bytes if self.closed else 0,
            bucket_bytes=self.closed.bucket_bytes if self.closed else 0,
            peak_resident_bytes=peak_resident_bytes(),
            digest=self.closed.digest if self.closed else None,
            holds_merged=self.closed.holds_merged if self.closed else None,
            metrics=self.metrics,
            checkpoints=self.checkpoints,
            servers=_servers(self.servers),
            collectives=self.collectives,
        )


def by_period(seconds: npt.NDArray[np.float64], period: int) -> npt.NDArray[np.float64]:
    """Means over whole periods of a schedule: where sync rounds are rare, most steps have none."""
    whole = len(seconds) - len(seconds) % period
    periods = seconds[:whole].reshape(-1, period) if whole else seconds.reshape(1, -1)
    return np.asarray(periods.mean(axis=1))


class Recorder:
    """Subscribe it: `events.subscribe(Recorder(directory, rank))`; at the end call `write()`.

    Live lines about steps come from the ranks that are told to, at most ten a second; notices, skipped steps
    and checkpoints from all. Where a script attaches several times, the numbers are of the last session.
    interface_bytes: reads a counter of what this worker's host has sent, where there is one.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        steps_live: bool = True,
        interface_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._steps_live = steps_live
        self._interface_bytes = interface_bytes
        self._tally: Tally | None = None
        self._live = live_path(directory, rank).open("w", buffering=1, encoding="utf-8")
        self._next_live = 0.0
        self._lock = threading.Lock()  # steps and notices may come from different threads

    def __call__(self, event: Event) -> None:
        with self._lock:
            if self._tally is not None:
                self._tally.last_moment = event.moment
            self._take(event)

    def write(self) -> None:
        """Write this rank's record, if a session took part in training: a worker that came back when the others had
        come to the end remains lost."""
        with self._lock:
            if self._tally is not None and self._tally.took_part:
                write_rank(self._directory, self._tally.record())
            self._live.close()

    @singledispatchmethod
    def _take(self, event: Event) -> None:
        """Other events are for other listeners."""

    @_take.register
    def _(self, event: Attached) -> None:
        self._tally = Tally(event, last_moment=event.moment)
        self._say("attached", recipe=event.recipe, workers=event.world, parameters=event.parameters)

    @_take.register
    def _(self, event: StepEnded) -> None:
        if self._tally is None:
            return
        self._tally.add(event)
        if self._interface_bytes is not None:
            self._tally.count(self._interface_bytes())
        if self._steps_live and event.moment >= self._next_live:
            self._next_live = event.moment + LIVE_SECONDS
            self._say_step(self._tally, event)

    @_take.register
    def _(self, event: Logged) -> None:
        if self._tally is None:
            return
        self._tally.latest |= event.values
        seconds = event.moment - self._tally.attached.moment
        for name, value in event.values.items():
            self._tally.metrics.setdefault(name, []).append((event.step, seconds, value))

    @_take.register
    def _(self, event: Skipped) -> None:
        self._say("skipped", step=event.step, rank=event.rank, tensor=event.tensor, scaled=event.scaled)

    @_take.register
    def _(self, event: Noticed) -> None:
        self._say("noticed", message=event.message)

    @_take.register
    def _(self, event: Saved) -> None:
        if self._tally is not None:
            self._tally.checkpoints.append((event.step, event.directory))
        self._say("saved", step=event.step, directory=event.directory)

    @_take.register
    def _(self, event: CollectivePicked) -> None:
        if self._tally is not None:
            self._tally.pick(str(event.nbytes), event.collective)

    @_take.register
    def _(self, event: ServersTold) -> None:
        if self._tally is not None:
            self._tally.servers = event

    @_take.register
    def _(self, event: Closed) -> None:
        if self._tally is not None:
            self._tally.closed = event
            self._tally.steps = event.steps

    def _say_step(self, tally: Tally, event: StepEnded) -> None:
        self._say(
            "step",
            step=event.step,
            seconds=event.moment - tally.attached.moment,
            steps_made=len(tally.times["seconds"]),
            waiting_share=event.waiting_seconds / event.seconds if event.seconds > 0 else 0.0,
            bytes_sent=event.bytes_sent,
            metrics=_finite(tally.latest),
        )

    def _say(self, kind: str, **content: Any) -> None:
        self._live.write(json.dumps({"kind": kind, **content}) + "\n")


def _servers(told: ServersTold | None) -> dict[str, Any] | None:
    if told is None:
        return None
    ages = {str(age): count for age, count in sorted(told.staleness.items())}
    return {"applied": told.applied, "late": told.late, "staleness": ages}


def _finite(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Non-finite values as text, since JSON has no number for them."""
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
