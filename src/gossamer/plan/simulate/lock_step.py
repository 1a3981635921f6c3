"""Lock step: virtual workers that wait for each other, on one time, and run concurrently up to the limits of the gate.

Each step takes as long as the job's clock estimates for all workers together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gossamer.base.bounded_mean import mean_of
from gossamer.events import StepEnded
from gossamer.plan.simulate.clock import JobClock
from gossamer.plan.simulate.virtual_worker import ATTACHED, JobGate, VirtualWorker


class LockStepWorker(VirtualWorker):
    """One worker in lock step with the others. Its logged values are placed by its steps."""

    def __init__(self, *arguments: Any, clock: JobClock) -> None:
        super().__init__(*arguments)
        self._clock, self._timed = clock, 0  # number of steps with known costs
        self._exchanges, self._since = 0, 0.0  # number so far, and seconds of those since its last step
        self.due: tuple[int, int] | None = None  # the steps, from one position to another, for which it waits
        self._before: int | None = None  # session.steps before its first step
        self._changes = 0  # of the shares by speed

    @property
    def settled(self) -> bool:
        waits = not self._gate.closed and self.due is not None and not self._gate.allows(self.due)
        return self.ended or waits

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if threading.current_thread() is not self._thread:  # a communication thread needs no baton
            yield
            return
        self._meet_others()
        self._baton.give()
        try:
            yield
        finally:
            self._baton.take(self._state)
            self._leave_if_closed()

    def now(self) -> float:
        return self._clock.moment(self._timed) + self._since

    def step_costs(self, measured: Mapping[str, float]) -> Mapping[str, float]:
        """Costs of an estimated step; its bytes are real."""
        self._timed, self._since = self._timed + 1, 0.0
        times = self._clock.times(self._timed)
        predicted = {
            "waiting_seconds": times.waiting_seconds,
            "encode_seconds": times.codec_seconds,
            "wire_seconds": times.wire_seconds,
            "decode_seconds": 0.0,
        }
        return {**measured, **predicted}

    def compute_seconds(self, measured: float, parts: int) -> float:
        """That of its speed, since workers take turns on this machine."""
        found = self._clock.times(self._timed + 1).part_seconds
        return parts * found[self.rank] if found else measured

    def change_shares(self, step: int, shares: tuple[int, ...]) -> None:
        self._clock.change_shares(self._changes, step - (self._before or 0), shares)
        self._changes += 1

    def exchanged(self) -> None:
        """All workers have exchanged a short text. Before training this takes no virtual time."""
        if self._timed:
            self._since += self._clock.exchange(self._exchanges)
            self._exchanges += 1

    def _meet_others(self) -> None:
        if not self.met:
            with self._gate.changed:
                self.met = True
                self._gate.changed.notify_all()

    def ask(self, step: int, begin: int | None = None) -> None:
        """Continue to this step, now or when the gate allows it. begin: position of the first step; None: the last."""
        due = (step - 1 if begin is None else begin, step)
        with self._gate.changed:
            self.due = due
            allowed = self._gate.allows(due)
            if not allowed:
                self._gate.changed.notify_all()
        if not allowed:
            with self.waiting(), self._gate.changed:
                self._gate.changed.wait_for(lambda: self._gate.closed or self._gate.allows(due))
        self._leave_if_closed()
        self.due = None

    def begin_training(self) -> None:
        period = self._clock.local_period
        self.ask(period or ATTACHED, ATTACHED if period else None)

    def step_ended(self, event: StepEnded) -> None:
        """A step counts when its time has come; until then the worker waits here, just before the end of the step."""
        period = self._clock.local_period
        if period is not None:
            self.bytes_sent += event.bytes_sent
            self._local_step_ended(event.step, period)
            return
        if self._before is None:
            self._before = event.step - 1
        self.ask(self.steps + 1)
        self.steps += 1
        self.bytes_sent += event.bytes_sent
        self.parts += self._clock.parts(self.rank, self.steps)

    def _local_step_ended(self, position: int, period: int) -> None:
        """Workers make different numbers of local steps, so they wait for each other's periods only."""
        if self._before is None:
            self._before = (position - 1) // period * period
        self.steps = self._timed = position - self._before
        self.parts += 1
        if self.steps % period == 0:
            self.ask(self.steps + period, self.steps)

    def point(self) -> float:
        return self.steps


class LockStepTime(JobClock):
    """The time of a job whose workers are in lock step, and run concurrently between its limits."""

    def worker(self, *arguments: Any) -> LockStepWorker:
        return LockStepWorker(*arguments, clock=self)

    def run(self, workers: Sequence[VirtualWorker], gate: JobGate, until: Callable[[], bool] | None = None) -> None:
        """Wait until all workers have reached the limits of the gate, or `until`."""
        with gate.changed:
            gate.changed.wait_for(until or (lambda: all(worker.settled for worker in workers)))

    def position(self, workers: Sequence[VirtualWorker]) -> tuple[int, float]:
        """Steps of the job so far, and its virtual second."""
        steps = workers[0].steps
        return steps, self.moment(steps)

    def points(self, logged: Mapping[float, Sequence[float]]) -> list[tuple[int, float, float]]:
        """Values by step, as means: (step, second, mean)."""
        return [(int(step), self.moment(int(step)), mean_of(values)) for step, values in sorted(logged.items())]

    def speed_use(self, parts: int, workers: Sequence[VirtualWorker]) -> float | None:
        """Samples per second so far, as a part of those of the workers without communication; None if unknown."""
        steps = workers[0].steps
        seconds = self.times(steps).part_seconds if steps else ()
        return parts / (self.moment(steps) * sum(1 / each for each in seconds)) if seconds else None
