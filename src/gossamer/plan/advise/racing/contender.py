"""Contender: one recipe in a race, with its job, what that has logged, and when it went out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gossamer.plan.advise.racing.against_baseline import AgainstBaseline
from gossamer.plan.advise.racing.loss_curve import LossCurve, Point

LOSSES = ("loss", "validation_loss")  # the first that all log is what they are compared by


class RaceProgress(Protocol):
    """How far a job has come; see simulate.JobProgress."""

    @property
    def steps(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, Sequence[Point]]: ...
    @property
    def bytes_sent(self) -> float: ...
    @property
    def ended(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...


class RaceJob(Protocol):
    """All workers of a script with one recipe, on a virtual clock; see simulate.SimulatedJob."""

    def advance(self, *, steps: int | None = None, seconds: float | None = None) -> RaceProgress: ...
    def close(self) -> None: ...


StartJob = Callable[[str, float], RaceJob]  # (recipe, learning rate factor)


@dataclass(kw_only=True)
class Contender:
    """recipe: as one would write it. starting, spent: seconds of this machine before its steps, and for them."""

    recipe: str
    learning_rate_factor: float = 1.0
    steps: int = 0
    seconds: float = 0.0  # virtual
    bytes_sent: float = 0.0  # mean per worker, in all
    metrics: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    ended: bool = False
    failure: str | None = None
    starting: float = 0.0
    spent: float = 0.0
    out: str | None = None  # why it did not go on; None for those that stayed to the end
    against: AgainstBaseline | None = None  # at the last moment when both were known

    @property
    def name(self) -> str:
        factor = self.learning_rate_factor
        return self.recipe if factor == 1 else f"{self.recipe}, learning rate x {factor:g}"

    def curve(self, metric: str) -> LossCurve:
        return LossCurve.of(self.metrics.get(metric, ()))

    def heard(self, progress: RaceProgress, spent: float) -> None:
        """Take over how far its job has come."""
        self.steps, self.seconds, self.bytes_sent = progress.steps, progress.seconds, progress.bytes_sent
        self.metrics, self.ended = progress.metrics, progress.ended
        self.spent += spent
        if progress.failure is not None:
            self.fails(progress.failure)

    def fails(self, reason: str) -> None:
        self.failure, self.out = reason, f"failed: {reason}"
