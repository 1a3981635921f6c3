"""Measurements: measurements of one rank since the last look, as text for all other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_STEPS = 20  # latest steps in a text; with four numbers each it stays below a kilobyte


class StepSeconds(NamedTuple):
    """Seconds of one step of one rank, by phase."""

    seconds: float  # since the end of the previous step
    waiting: float  # of the training thread, for the communication thread
    wire: float  # of the communication thread, waiting for answers
    codec: float  # of the communication thread, computing

    @property
    def computing(self) -> float:
        """Seconds in which the training thread did not wait."""
        return max(0.0, self.seconds - self.waiting)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of one rank. None: not known on it."""

    steps: Sequence[StepSeconds] = ()  # since the last look, or only slow ones; empty if the rank is out of data
    covers_steps: int = 0  # number of steps, which may be more than are listed
    bytes_sent: float = 0.0  # payload of one step, on average
    look_seconds: float | None = None  # of the training thread, for the last look
    exchange_seconds: float | None = None  # part of it in the exchange: a round trip
    learning_rate: float | None = None
    gradient_norm: float | None = None  # of the averaged gradients, in the last step
    residual_norm: float | None = None  # of unsent values of this rank

    def to_text(self) -> str:
        """As JSON, with four digits of every duration, which exceeds the precision of clocks."""
        fields = {**vars(self), "steps": [[_rounded(number) for number in step] for step in self.steps[-MOST_STEPS:]]}
        return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Measurement:
        fields = json.loads(text)
        return cls(**{**fields, "steps": tuple(StepSeconds(*step) for step in fields["steps"])})


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def common_steps(measurements: Iterable[Measurement]) -> list[Sequence[StepSeconds]]:
    """The steps for which all ranks with data have measurements: the latest ones of each rank."""
    steps_by_rank = [measurement.steps for measurement in measurements if measurement.steps]
    count = min(map(len, steps_by_rank), default=0)
    return [steps[len(steps) - count :] for steps in steps_by_rank] if count else []


# -- slow steps --------------------------------------------------------------------------------------------------------


LEAST_STEPS = 2  # minimum for a separate measurement, since a single slow step may be an outlier


def asks_for_look(steps: Sequence[StepSeconds], usual: float | None) -> bool:
    """Whether the latest step waited longer than a whole step took at the last look. usual: those seconds, or None.
    Long computing, for example an evaluation, is no reason to look."""
    return bool(_tail(steps, usual))


def slow_steps(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """The latest slow steps, if a look should use only them; otherwise empty."""
    tail = _tail(steps, usual)
    return tail if len(tail) >= LEAST_STEPS else ()


def _tail(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """The longest sequence of steps at the end that waited longer than a usual step took."""
    if usual is None:
        return ()
    begin = len(steps)
    while begin and steps[begin - 1].waiting > usual:
        begin -= 1
    return steps[begin:]
