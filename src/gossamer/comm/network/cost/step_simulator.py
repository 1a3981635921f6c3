"""Step simulation: time of a training step in virtual time, from its messages, a network, and measured computation.

Each rank has a training thread and a communication thread, which reduces buckets during the backward pass. `run_step`
simulates one step; `run_turns` and `run_sites` simulate sync rounds in flight during several steps. All costs of a step
are computed with these, on any AnswerTimes. `even_wait` is the closed form of `run_step` for buckets that become ready
evenly. The `auto` recipe evaluates its candidates with it during training, on the line that it has fitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Protocol

from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.algorithms.strategies.shares_by_speed import steps_until
from gossamer.base.ops import CollectiveOp
from gossamer.comm.runtime.pipeline import DEPTH, Pipeline

BACKWARD_SHARE = 2 / 3  # of a pass's computation, during which gradients become ready evenly, by assumption
STEPS_UNTIL_STEADY = 4
CYCLES = 2  # measured cycles


def ready_seconds(pass_seconds: float, share: float) -> float:
    """Time at which this share of the gradients is ready, from the beginning of a forward and backward pass."""
    return pass_seconds * (1 + 2 * share) / 3


def even_wait(busy_seconds: float, shares: Sequence[float], hidden_seconds: float) -> float:
    """Wait of the training thread in a step whose gradients become ready evenly, the last at its end.

    The communication thread cannot begin bucket j before it is ready, and all later buckets follow:
    wait = max over j of busy (s_j + ... + s_n) - hidden (s_{j+1} + ... + s_n) / (s_2 + ... + s_n)

    Args:
        busy_seconds: Total time of the communication thread for all buckets.
        shares: s, of all gradients in each bucket, in the order in which they are sent; their sum is 1.
        hidden_seconds: Time from the first ready bucket to the last.
    """
    from_here = list(accumulate(reversed(shares)))[::-1]  # of bucket j and all later ones
    after_first = sum(shares[1:]) or 1.0
    return max(
        busy_seconds * here - hidden_seconds * (here - share) / after_first
        for here, share in zip(from_here, shares, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class BucketJob:
    """One bucket's work on the communication thread."""

    ready_seconds: float = 0.0  # from the beginning of the step until its gradients are complete
    #: (computation before the operation, the operation of all ranks or of each, arithmetic within it), in seconds
    rounds: Sequence[tuple[float, CollectiveOp | tuple[CollectiveOp, ...], float]]
    last_seconds: float = 0.0  # computation after the last operation


@dataclass(frozen=True, kw_only=True)
class Step:
    """Times of one step: by rank, in seconds."""

    ends: Sequence[float]  # end times
    waiting: Sequence[float]  # of the training thread, for the communication thread
    wire: Sequence[float]  # of the communication thread, for results: as in runner.ScriptCost
    codec: Sequence[float]  # of the communication thread, for computation


class Pace(Protocol):
    """A worker's step without a network: the fields of a WorkloadProfile that a simulation needs."""

    @property
    def backward_seconds(self) -> float: ...
    @property
    def rest_seconds(self) -> float: ...
    @property
    def buffer_bytes(self) -> Sequence[int]: ...
    @property
    def crowded(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """A rank's part of the work, relative to the `Pace`, which is the step of one pass of a worker of speed 1."""

    slowdown: float = 1.0  # of everything that the rank computes
    parts: int | None = None  # backward passes per step, or local steps per period; None: as many as the schedule
    batch: float = 1.0  # samples of a pass


PLAIN = RankWork()


class AnswerTimes(Protocol):
    """Network model: when each rank has the result of an operation, given the time at which each rank issues it."""

    def answer(self, ops: Sequence[CollectiveOp], starts: Sequence[float]) -> list[float]: ...
    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]: ...


@dataclass
class VirtualCommThread:
    """One rank's communication thread."""

    free_at: float = 0.0
    slowdown: float = 1.0
    wire: float = 0.0  # total seconds waiting for results
    codec: float = 0.0  # total seconds of computation

    def compute(self, seconds: float) -> None:
        self.free_at += seconds
        self.codec += seconds

    def wait_until(self, moment: float) -> None:
        """Wait for a result that arrives at that time, or has arrived."""
        self.wire += max(0.0, moment - self.free_at)
        self.free_at = max(self.free_at, moment)


@dataclass
class _RunningJob:
    """A job on all ranks' communication threads at once."""

    job: BucketJob
    ranks: Sequence[VirtualCommThread]
    lines: AnswerTimes
    issued: int = 0  # operations
    answered: Sequence[float] = ()  # when the last operation's results arrive, by rank

    def advance(self) -> bool:
        if self.issued:
            _wait_until(self.ranks, self.answered)
        if self.issued == len(self.job.rounds):
            self._compute(self.job.last_seconds)
            return False
        computing, op, engine = self.job.rounds[self.issued]
        self._compute(computing)
        ops = op if isinstance(op, tuple) else [op] * len(self.ranks)
        received = self.lines.answer(ops, [rank.free_at for rank in self.ranks])
        self.answered = [moment + engine * rank.slowdown for moment, rank in zip(received, self.ranks, strict=True)]
        self.issued += 1
        return True

    def _compute(self, seconds: float) -> None:
        for rank in self.ranks:
            rank.compute(seconds * rank.slowdown)


def run_jobs(jobs: Sequence[BucketJob], ranks: Sequence[VirtualCommThread], lines: AnswerTimes) -> None:
    """Run jobs that are all ready."""
    pipeline = Pipeline()
    for job in jobs:
        pipeline.put(_RunningJob(job, ranks, lines))
    pipeline.finish()


def run_step(
    jobs: Sequence[BucketJob],
    pace: Pace,
    lines: AnswerTimes,
    begins: Sequence[float],
    window: int = DEPTH,
    works: Sequence[RankWork] = (),
) -> Step:
    """Simulate one step of every rank: buckets in order, each when it is ready and the communication thread is free.

    Passes before a step's last one send nothing, and have no optimizer step.

    Args:
        jobs: of all ranks.
        pace: a worker's pass and optimizer step.
        lines: the network.
        begins: time at which each rank begins the step.
        window: the pipeline's depth.
        works: of each rank; empty: one pass at this pace.
    """
    ranks = [_InStep.of(begin, pace, work) for begin, work in zip(begins, works or [PLAIN] * len(begins), strict=True)]
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
        ends=[moment + pace.rest_seconds * rank.slowdown for moment, rank in zip(resumed, ranks, strict=True)],
        waiting=[moment - rank.backward for moment, rank in zip(resumed, ranks, strict=True)],
        wire=[rank.wire for rank in ranks],
        codec=[rank.codec for rank in ranks],
    )


def _wait_until(ranks: Sequence[VirtualCommThread], moments: Sequence[float]) -> None:
    for rank, moment in zip(ranks, moments, strict=True):
        rank.wait_until(moment)


@dataclass(kw_only=True)
class _InStep(VirtualCommThread):
    """A communication thread during one backward pass."""

    begin: float  # of the step's last pass
    backward: float  # end time of that pass
    crowded: bool  # whether all cores are busy
    stretch: float = 1.0  # of the pass, by speed and samples
    delay: float = 0.0  # of the backward pass, because cores are shared

    @classmethod
    def of(cls, begin: float, pace: Pace, work: RankWork) -> _InStep:
        stretch = work.slowdown * work.batch
        begin += ((work.parts or 1) - 1) * pace.backward_seconds * stretch
        backward = begin + pace.backward_seconds * stretch
        return cls(begin, work.slowdown, begin=begin, backward=backward, crowded=pace.crowded, stretch=stretch)

    def wait_for(self, ready_seconds: float) -> None:
        self.free_at = max(self.free_at, self.begin + ready_seconds * self.stretch + self.delay)

    def compute(self, seconds: float) -> None:
        """If all cores are busy, the backward pass and this thread alternate while both have work."""
        shared = min(seconds, max(0.0, self.backward - self.free_at)) if self.crowded else 0.0
        self.delay += shared
        self.backward += shared
        super().compute(seconds + shared)


# -- sync rounds in flight during training -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trip:
    """The parts of one fragment's sync round."""

    jobs: Sequence[BucketJob]  # of the communication thread; the first, a participation poll, ends before the others
    offering_seconds: float = 0.0  # of the training thread, before the round
    landing_seconds: float = 0.0  # of the training thread, after it


@dataclass(frozen=True, kw_only=True)
class PerStep:
    """Steady-state seconds per step, means over workers."""

    seconds: float
    waiting: float  # of the training thread, for the communication thread
    wire: float  # of the communication thread, for results
    codec: float  # of the communication thread, for computation


def run_turns(
    trips: Sequence[Trip],
    schedule: PeriodicSchedule,
    pace: Pace,
    lines: AnswerTimes,
    works: Sequence[RankWork],
    spread: int = 0,
) -> PerStep:
    """Simulate a schedule until it is periodic, and then CYCLES periods.

    Args:
        trips: by fragment.
        schedule: of the rounds, in steps of a worker with as many steps per period as the schedule.
        pace: a worker's pass and optimizer step.
        lines: the network.
        works: of each simulated rank.
        spread: rounds until all workers have waited for the slowest, if they wait for their neighbors only.
    """
    workers = [
        _RankInRounds(
            slowdown=work.slowdown,
            pass_seconds=(pace.backward_seconds + pace.rest_seconds) * work.slowdown,
            crowded=pace.crowded,
            period=schedule.period,
            steps=work.parts or schedule.period,
        )
        for work in works
    ]
    warm = -(-schedule.delay // schedule.period) + 2 + spread
    before = _spent(workers)
    for cycle in range(warm + CYCLES):
        if cycle == warm:
            before = _spent(workers)
        for fragment, trip in enumerate(trips):
            _, launch, landing = schedule.sync_round(cycle * schedule.fragments + fragment)
            _run_round(trip, launch, landing, workers, lines)
        for worker in workers:
            worker.land_until((cycle + 1) * schedule.period)
    return _per_step(before, _spent(workers), CYCLES * schedule.period)


def _run_round(trip: Trip, launch: int, landing: int, workers: Sequence[_RankInRounds], lines: AnswerTimes) -> None:
    for worker in workers:
        worker.send(launch, landing, trip.offering_seconds * worker.slowdown)
    run_jobs(trip.jobs[:1], workers, lines)
    run_jobs(trip.jobs[1:], workers, lines)
    for worker in workers:
        worker.under_way.append((landing, worker.free_at, trip.landing_seconds * worker.slowdown))


def run_sites(
    jobs: Sequence[BucketJob],
    trips: Sequence[Trip],
    schedule: PeriodicSchedule,
    pace: Pace,
    inside: AnswerTimes,
    lines: AnswerTimes,
    works: Sequence[RankWork],
) -> PerStep:
    """Simulate steps within sites, over `inside`, and rounds between all workers, for which every worker waits.

    works: of each simulated rank; one pass per step.
    """
    workers = [_RankInRounds(slowdown=work.slowdown, pass_seconds=0.0, crowded=False) for work in works]
    before = _spent(workers)
    for cycle in range(1 + CYCLES):
        if cycle == 1:
            before = _spent(workers)
        for fragment, trip in enumerate(trips):
            number = cycle * schedule.fragments + fragment
            launch = schedule.sync_round(number).launch
            since = schedule.sync_round(number - 1).launch if number else 0
            _steps(launch - since, jobs, workers, pace, inside, works)
            _run_round(trip, launch, launch, workers, lines)
            for worker in workers:
                worker.land_until(launch)
    return _per_step(before, _spent(workers), CYCLES * schedule.period)


def _steps(
    count: int,
    jobs: Sequence[BucketJob],
    workers: Sequence[_RankInRounds],
    pace: Pace,
    inside: AnswerTimes,
    works: Sequence[RankWork],
) -> None:
    """Simulate a few steps; the last represents all that follow."""
    for made in range(min(count, STEPS_UNTIL_STEADY)):
        alike = count - made if made == STEPS_UNTIL_STEADY - 1 else 1
        begins = [worker.now for worker in workers]
        step = run_step(jobs, pace, inside, begins, works=works)
        for rank, worker in enumerate(workers):
            worker.now += alike * (step.ends[rank] - begins[rank])
            worker.waiting += alike * step.waiting[rank]
            worker.wire += alike * step.wire[rank]
            worker.codec += alike * step.codec[rank]


Spent = list[tuple[float, float, float, float, float]]


def _spent(workers: Sequence[_RankInRounds]) -> Spent:
    return [(worker.now, worker.waiting, worker.wire, worker.codec, worker.behind) for worker in workers]


def _per_step(before: Spent, after: Spent, steps: int) -> PerStep:
    """Mean per step. If a communication thread falls behind in every period, its delay becomes waiting time."""
    found = [[(b - a) / steps for a, b in zip(*both, strict=True)] for both in zip(before, after, strict=True)]
    seconds, waiting, wire, codec, behind = (fmean(each) for each in zip(*found, strict=True))
    late = max(0.0, behind)
    return PerStep(seconds=seconds + late, waiting=waiting + late, wire=wire, codec=codec)


@dataclass(kw_only=True)
class _RankInRounds(VirtualCommThread):
    """One rank: its training thread and its communication thread."""

    pass_seconds: float  # of one backward pass and optimizer step
    crowded: bool  # whether all cores are busy
    period: int = 1  # of the schedule
    steps: int = 1  # local steps of this rank per period
    now: float = 0.0  # of the training thread
    passes: int = 0  # position in the schedule at `now`
    waiting: float = 0.0  # seconds so far
    waits: float = 0.0  # when training will wait for the current round of the communication thread
    under_way: deque[tuple[int, float, float]] = field(default_factory=deque)  # (landing pass, arrival, its seconds)
    #: (begin, end) of computation during training on a busy processor, so that both run at half speed
    shares: list[tuple[float, float]] = field(default_factory=list)

    @property
    def behind(self) -> float:
        """How much longer the communication thread will be busy."""

        return max(0.0, self.free_at - self.now)

    def send(self, launch: int, landing: int, offering_seconds: float) -> None:
        self.land_until(launch - 1)
        self._train_until(launch)
        self._train(offering_seconds)
        self.free_at = max(self.free_at, self.now)
        ahead = copy(self)
        ahead.under_way = self.under_way.copy()
        ahead.land_until(landing)
        self.waits = ahead.now

    def land_until(self, passes: int) -> None:
        while self.under_way and self.under_way[0][0] <= passes:
            landing, arrives, seconds = self.under_way.popleft()
            self._train_until(landing)
            self.waiting += max(0.0, arrives - self.now)
            self.now = max(self.now, arrives)
            self._train(seconds)
        self._train_until(passes)

    def _train_until(self, passes: int) -> None:
        made, before = (steps_until(each, self.steps, self.period) for each in (passes, self.passes))
        self._train((made - before) * self.pass_seconds)
        self.passes = passes

    def _train(self, seconds: float) -> None:
        self.shares = [(begin, end) for begin, end in self.shares if end > self.now]
        for begin, end in self.shares:
            alone = max(0.0, begin - self.now)
            if seconds <= alone:
                break
            both = min(end - self.now - alone, 2 * (seconds - alone))
            seconds -= alone + both / 2
            self.now += alone + both
        self.now += seconds

    def compute(self, seconds: float) -> None:
        shared = min(seconds, max(0.0, self.waits - self.free_at)) if self.crowded else 0.0
        if shared:
            self.shares.append((self.free_at, self.free_at + 2 * shared))
        self.waits += shared
        super().compute(seconds + shared)
