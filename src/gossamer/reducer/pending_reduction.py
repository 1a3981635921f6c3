"""Pending reduction: hands buckets to the communication thread while backward goes on, and waits for the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gossamer.reducer.bucket import Bucket
from gossamer.reducer.reduction import BucketInput, StepReduction, StepTrailer
from gossamer.reducer.step_report import StepDecision
from gossamer.runtime.comm_thread import CommThread, Work


@dataclass(frozen=True)
class StepContext:
    """The training loop at the first gradient of a backward pass."""

    scale: float | None  # the factor that a GradScaler put into the gradients, None without one
    settings: str  # the optimizer's hyperparameters
    momentum: tuple[float, bool]  # and whether it is Nesterov's, where the compressor applies it
    first_batch: int  # a hash of this rank's

    def scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self.scale or 1.0) if bucket.state else 1.0


class PendingReduction:
    """One step's reduction as the training thread sees it."""

    def __init__(self, reduction: StepReduction, comm_thread: CommThread, taken: StepContext) -> None:
        self.reduction, self.taken, self._comm_thread = reduction, taken, comm_thread
        self._work: list[Work[Any]] = []

    def begin(self, buckets: Sequence[Bucket], warn: Callable[[Sequence[tuple[int, float]]], None]) -> None:
        """Find out what must be known before the first bucket leaves."""
        if self.reduction.reference is None:
            self._comm_thread.submit(partial(self.reduction.open, self.taken.first_batch, warn))
        if any(bucket.state for bucket in buckets):
            self._comm_thread.submit(self.reduction.weigh)

    @property
    def sent(self) -> int:
        """How many buckets have left."""
        return len(self._work)

    def send(self, bucket: Bucket, fresh: BucketInput, trailer: StepTrailer | None) -> None:
        """Hand a bucket over; the last one takes this rank's report along."""
        job: Callable[[], Any] = partial(self.reduction.exchange, bucket, fresh, self.taken.scale_of(bucket))
        if trailer is not None:
            job = partial(self.reduction.close, bucket, fresh, self.taken.scale_of(bucket), trailer)
        self._work.append(self._comm_thread.submit(job))

    def wait(self) -> StepDecision:
        """Once all buckets were sent: what all ranks decided together."""
        *_, decision = [work.wait() for work in self._work]
        return decision  # type: ignore[no-any-return]
