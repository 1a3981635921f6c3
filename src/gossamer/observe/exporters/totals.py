"""Totals of a rank so far, as counters, gauges and a histogram, for tools that poll them.

Names follow OpenTelemetry, with UCUM units; Prometheus's names are derived from them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.events import Attached, Event, GroupChanged, Logged, StepEnded

MOST_METRICS = 10_000  # names; a loop with a new name in each step would fill the memory
BOUNDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5))  # seconds of a step


@dataclass(frozen=True)
class Instrument:
    """A number with its name, unit and meaning."""

    name: str
    unit: str  # UCUM; braces contain the counted unit
    meaning: str
    event_field: str = ""  # field of StepEnded to add


STEP_DURATION = Instrument("gossamer.step.duration", "s", "Time from the end of one step to the end of the next")
COUNTERS = (
    Instrument(
        "gossamer.step.waiting", "s", "Time that the training thread waited for communication", "waiting_seconds"
    ),
    Instrument("gossamer.step.encode", "s", "Time that the communication thread encoded", "encode_seconds"),
    Instrument("gossamer.step.wire", "s", "Time that the communication thread was on the network", "wire_seconds"),
    Instrument("gossamer.step.decode", "s", "Time that the communication thread decoded", "decode_seconds"),
    Instrument("gossamer.payload.sent", "By", "Payload sent to other workers and servers", "bytes_sent"),
    Instrument("gossamer.payload.pulled", "By", "Payload pulled from parameter servers", "bytes_pulled"),
    Instrument("gossamer.steps", "{step}", "Steps that were committed or skipped"),
    Instrument("gossamer.steps.skipped", "{step}", "Steps skipped because a gradient was not finite", "skipped"),
)
STEP = Instrument("gossamer.step", "{step}", "The last step")
WORKERS = Instrument("gossamer.workers", "{worker}", "Workers in the group")
LOGGED = Instrument("gossamer.logged", "1", "The latest value logged by the training loop, by metric")


class Totals:
    """Sums the events of one rank."""

    def __init__(self) -> None:
        self.began = time.time()  # unix seconds
        self.counters: dict[Instrument, float] = dict.fromkeys(COUNTERS, 0.0)
        self.gauges: dict[Instrument, float] = {}
        self.logged: dict[str, float] = {}  # by metric
        self.durations = [0] * (len(BOUNDS) + 1)  # number of steps between each bound and the previous one
        self.seconds = 0.0  # of all steps

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case StepEnded():
                    self._step(event)
                case Logged():
                    self._log(event)
                case Attached() | GroupChanged():
                    self.gauges[WORKERS] = event.world

    def _step(self, event: StepEnded) -> None:
        self.durations[bisect_left(BOUNDS, event.seconds)] += 1
        self.seconds += event.seconds
        self.gauges[STEP] = event.step
        for instrument in COUNTERS:
            self.counters[instrument] += getattr(event, instrument.event_field) if instrument.event_field else 1

    def _log(self, event: Logged) -> None:
        self.logged |= event.values
        while len(self.logged) > MOST_METRICS:
            del self.logged[next(iter(self.logged))]
