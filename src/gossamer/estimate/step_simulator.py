"""Steps in virtual time: a lane that takes buckets while the backward pass goes on, on every rank at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gossamer.core.ops import CollectiveOp
from gossamer.runtime.pipeline import DEPTH, Pipeline


@dataclass(frozen=True, kw_only=True)
class BucketJob:
    """One bucket on the lane. rounds: (seconds of computing before it, the word, seconds of arithmetic within it).

    A tuple of words is what each rank says; one word is what all of them say.
    """

    ready_seconds: float = 0.0
    rounds: Sequence[tuple[float, CollectiveOp | tuple[CollectiveOp, ...], float]]
    last_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took: by rank, in seconds. ends: the moments at which it was over; wire: as in drive.Performed."""

    ends: Sequence[float]
    waiting: Sequence[float]
    wire: Sequence[float]
    codec: Sequence[float]


class Pace(Protocol):
    """What a worker does in a step without any network: as in foretell.Measured."""

    @property
    def backward_seconds(self) -> float: ...
    @property
    def rest_seconds(self) -> float: ...
    @property
    def buffer_bytes(self) -> Sequence[int]: ...
    @property
    def crowded(self) -> bool: ...


class AnswerTimes(Protocol):
    """Says when words have their answers: given everyone's words and the moments at which they say them."""

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]: ...
    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]: ...


@dataclass
class VirtualCommThread:
    """One rank's lane: when it is free, and what it has spent so far."""

    free_at: float = 0.0
    wire: float = 0.0
    codec: float = 0.0

    def compute(self, seconds: float) -> None:
        self.free_at += seconds
        self.codec += seconds

    def wait_until(self, moment: float) -> None:
        """Wait for what comes at that moment, or is there already."""
        self.wire += max(0.0, moment - self.free_at)
        self.free_at = max(self.free_at, moment)


@dataclass
class _RunningJob:
    """A job on every rank's lane at once. said: how many words; answered: when the last one's answers come, by rank."""

    job: BucketJob
    ranks: Sequence[VirtualCommThread]
    lines: AnswerTimes
    issued: int = 0
    answered: Sequence[float] = ()

    def advance(self) -> bool:
        if self.issued:
            _wait_until(self.ranks, self.answered)
        if self.issued == len(self.job.rounds):
            self._compute(self.job.last_seconds)
            return False
        computing, op, engine = self.job.rounds[self.issued]
        self._compute(computing)
        ops = op if isinstance(op, tuple) else [op] * len(self.ranks)
        heard = self.lines.answer(ops, [rank.free_at for rank in self.ranks])
        self.answered = [moment + engine for moment in heard]
        self.issued += 1
        return True

    def _compute(self, seconds: float) -> None:
        for rank in self.ranks:
            rank.compute(seconds)


def run_jobs(jobs: Sequence[BucketJob], ranks: Sequence[VirtualCommThread], lines: AnswerTimes) -> None:
    """Jobs that are all ready."""
    pipeline = Pipeline()
    for job in jobs:
        pipeline.put(_RunningJob(job, ranks, lines))
    pipeline.finish()


def run_step(
    jobs: Sequence[BucketJob], pace: Pace, lines: AnswerTimes, begins: Sequence[float], window: int = DEPTH
) -> Step:
    """One step of every rank: a lane that takes buckets in order, each when it is ready and the lane is free.

    window: as of the conveyor.
    """
    ranks = [
        _InStep(begin, begin=begin, backward=begin + pace.backward_seconds, crowded=pace.crowded) for begin in begins
    ]
    pipeline = Pipeline(window)
    for job in jobs:
        for rank in ranks:
            rank.wait_for(job.ready_seconds)
        pipeline.put(_RunningJob(job, ranks, lines))
    pipeline.finish()
    for nbytes in pace.buffer_bytes if jobs else ():
        _wait_until(ranks, lines.broadcast(nbytes, [rank.free_at for rank in ranks]))
    resumed = [max(rank.free_at, rank.backward) for rank in ranks]
    return Step(
        ends=[moment + pace.rest_seconds for moment in resumed],
        waiting=[moment - rank.backward for moment, rank in zip(resumed, ranks, strict=True)],
        wire=[rank.wire for rank in ranks],
        codec=[rank.codec for rank in ranks],
    )


def _wait_until(ranks: Sequence[VirtualCommThread], moments: Sequence[float]) -> None:
    for rank, moment in zip(ranks, moments, strict=True):
        rank.wait_until(moment)


@dataclass(kw_only=True)
class _InStep(VirtualCommThread):
    """begin: of the step; backward: when that pass will be over; delay: of it, because processors are shared."""

    begin: float
    backward: float
    crowded: bool
    delay: float = 0.0

    def wait_for(self, ready_seconds: float) -> None:
        self.free_at = max(self.free_at, self.begin + ready_seconds + self.delay)

    def compute(self, seconds: float) -> None:
        """Where all cores are busy, the backward pass and this thread take turns while both have something to do."""
        shared = min(seconds, max(0.0, self.backward - self.free_at)) if self.crowded else 0.0
        self.delay += shared
        self.backward += shared
        super().compute(seconds + shared)
