"""Measurements: what one rank has measured since the last look, as text that travels to all others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_STEPS = 20  # that are told of, the latest ones: with four numbers each they stay below a kilobyte


class StepSeconds(NamedTuple):
    """Where one step of one rank went, in seconds."""

    seconds: float  # from the end of the step before
    waiting: float  # of the training thread, for the communication thread
    wire: float  # of the communication thread, for answers
    codec: float  # of the communication thread, computing

    @property
    def computing(self) -> float:
        """Of the training thread."""
        return max(0.0, self.seconds - self.waiting)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One rank's numbers. None: not known here."""

    steps: Sequence[StepSeconds] = ()  # since the last look, or since they are slow; none where it is out of data
    stands_for: int = 0  # steps: more than are told of, where there were many
    bytes_sent: float = 0.0  # payload, in one of them, on average
    look_seconds: float | None = None  # the training thread's, for the last look
    exchange_seconds: float | None = None  # of them, between saying and having heard: a message there and back
    learning_rate: float | None = None
    gradient_norm: float | None = None  # of the averaged gradients, in the last step
    residual_norm: float | None = None  # of what this rank has still to send

    def to_text(self) -> str:
        """Four digits of every second: more than clocks can tell."""
        fields = {**vars(self), "steps": [[_rounded(number) for number in step] for step in self.steps[-MOST_STEPS:]]}
        return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Measurement:
        fields = json.loads(text)
        return cls(**{**fields, "steps": tuple(StepSeconds(*step) for step in fields["steps"])})


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def common_steps(measurements: Iterable[Measurement]) -> list[Sequence[StepSeconds]]:
    """The steps that all ranks with data have told of: of each such rank, the latest ones."""
    told = [measurement.steps for measurement in measurements if measurement.steps]
    count = min(map(len, told), default=0)
    return [steps[len(steps) - count :] for steps in told] if count else []
