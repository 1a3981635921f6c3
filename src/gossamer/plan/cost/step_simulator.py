"""Step simulation in virtual time: each rank's communication thread reduces buckets while its backward pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gossamer.base.ops import CollectiveOp
from gossamer.comm.runtime.pipeline import DEPTH, Pipeline


@dataclass(frozen=True, kw_only=True)
class BucketJob:
    """One bucket's work on the communication thread."""

    ready_seconds: float = 0.0  # after the step began, its gradients are complete
    #: (computing before the operation, the operation of all ranks or of each, arithmetic within it), in seconds
    rounds: Sequence[tuple[float, CollectiveOp | tuple[CollectiveOp, ...], float]]
    last_seconds: float = 0.0  # computing after the last operation


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took: by rank, in seconds."""

    ends: Sequence[float]  # the moments at which it was over
    waiting: Sequence[float]  # of the training thread, for the communication thread
    wire: Sequence[float]  # of the communication thread, for answers: as in runner.ScriptCost
    codec: Sequence[float]  # of the communication thread, computing


class Pace(Protocol):
    """What a worker does in a step without a network: those fields of a WorkloadProfile that a simulation needs."""

    @property
    def backward_seconds(self) -> float: ...
    @property
    def rest_seconds(self) -> float: ...
    @property
    def buffer_bytes(self) -> Sequence[int]: ...
    @property
    def crowded(self) -> bool: ...


class AnswerTimes(Protocol):
    """Network model: when each rank has the answer to an operation, given the moments at which the ranks issue it."""

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]: ...
    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]: ...


@dataclass
class VirtualCommThread:
    """One rank's communication thread."""

    free_at: float = 0.0
    wire: float = 0.0  # seconds spent so far, waiting for answers
    codec: float = 0.0  # seconds spent so far, computing

    def compute(self, seconds: float) -> None:
        self.free_at += seconds
        self.codec += seconds

    def wait_until(self, moment: float) -> None:
        """Wait for an answer that comes at that moment, or has come."""
        self.wire += max(0.0, moment - self.free_at)
        self.free_at = max(self.free_at, moment)


@dataclass
class _RunningJob:
    """A job on all ranks' communication threads at once."""

    job: BucketJob
    ranks: Sequence[VirtualCommThread]
    lines: AnswerTimes
    issued: int = 0  # operations
    answered: Sequence[float] = ()  # when the last operation's answers come, by rank

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
    """Run jobs that are all ready."""
    pipeline = Pipeline()
    for job in jobs:
        pipeline.put(_RunningJob(job, ranks, lines))
    pipeline.finish()


def run_step(
    jobs: Sequence[BucketJob], pace: Pace, lines: AnswerTimes, begins: Sequence[float], window: int = DEPTH
) -> Step:
    """One step of every rank: buckets in order, each once it is ready and the communication thread is free.

    window: the pipeline's depth.
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
    """A communication thread beside one backward pass."""

    begin: float  # of the step
    backward: float  # when that pass will be over
    crowded: bool  # whether all cores are busy
    delay: float = 0.0  # of the backward pass, because processors are shared

    def wait_for(self, ready_seconds: float) -> None:
        self.free_at = max(self.free_at, self.begin + ready_seconds + self.delay)

    def compute(self, seconds: float) -> None:
        """Where all cores are busy, the backward pass and this thread take turns while both have something to do."""
        shared = min(seconds, max(0.0, self.backward - self.free_at)) if self.crowded else 0.0
        self.delay += shared
        self.backward += shared
        super().compute(seconds + shared)
