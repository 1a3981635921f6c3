"""Schedule simulation in virtual time: sync rounds in flight beside training, and how long training waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from statistics import fmean

from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.plan.cost.step_simulator import AnswerTimes, BucketJob, Pace, VirtualCommThread, run_jobs, run_step

STEPS_UNTIL_STEADY = 4
CYCLES = 2  # that count


@dataclass(frozen=True, kw_only=True)
class Trip:
    """What one fragment's sync round is made of."""

    jobs: Sequence[BucketJob]  # of the communication thread; the first, a participation poll, ends before the others
    offering_seconds: float = 0.0  # of the training thread, before the round
    landing_seconds: float = 0.0  # of the training thread, after it


@dataclass(frozen=True, kw_only=True)
class PerStep:
    """Seconds of one step in the long run, means over workers."""

    seconds: float
    waiting: float  # of the training thread, for the communication thread
    wire: float  # of the communication thread, for answers
    codec: float  # of the communication thread, computing


def run_turns(trips: Sequence[Trip], schedule: PeriodicSchedule, pace: Pace, lines: AnswerTimes, world: int) -> PerStep:
    """Simulate a schedule until it repeats itself, and then the periods that count. trips: by fragment."""
    workers = [
        _VirtualWorker(pass_seconds=pace.backward_seconds + pace.rest_seconds, crowded=pace.crowded)
        for _ in range(world)
    ]
    warm = -(-schedule.delay // schedule.period) + 2
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


def _run_round(trip: Trip, launch: int, landing: int, workers: Sequence[_VirtualWorker], lines: AnswerTimes) -> None:
    for worker in workers:
        worker.send(launch, landing, trip.offering_seconds)
    run_jobs(trip.jobs[:1], workers, lines)
    run_jobs(trip.jobs[1:], workers, lines)
    for worker in workers:
        worker.under_way.append((landing, worker.free_at, trip.landing_seconds))


def run_sites(
    jobs: Sequence[BucketJob],
    trips: Sequence[Trip],
    schedule: PeriodicSchedule,
    pace: Pace,
    inside: AnswerTimes,
    lines: AnswerTimes,
    world: int,
) -> PerStep:
    """Steps within sites, over `inside`, and rounds between all workers, which every worker waits for."""
    workers = [_VirtualWorker(pass_seconds=0.0, crowded=False) for _ in range(world)]
    before = _spent(workers)
    for cycle in range(1 + CYCLES):
        if cycle == 1:
            before = _spent(workers)
        for fragment, trip in enumerate(trips):
            number = cycle * schedule.fragments + fragment
            launch = schedule.sync_round(number).launch
            _steps(launch - (schedule.sync_round(number - 1).launch if number else 0), jobs, workers, pace, inside)
            _run_round(trip, launch, launch, workers, lines)
            for worker in workers:
                worker.land_until(launch)
    return _per_step(before, _spent(workers), CYCLES * schedule.period)


def _steps(
    count: int, jobs: Sequence[BucketJob], workers: Sequence[_VirtualWorker], pace: Pace, inside: AnswerTimes
) -> None:
    """The last of a few steps stands for all that follow."""
    for made in range(min(count, STEPS_UNTIL_STEADY)):
        alike = count - made if made == STEPS_UNTIL_STEADY - 1 else 1
        begins = [worker.now for worker in workers]
        step = run_step(jobs, pace, inside, begins)
        for rank, worker in enumerate(workers):
            worker.now += alike * (step.ends[rank] - begins[rank])
            worker.waiting += alike * step.waiting[rank]
            worker.wire += alike * step.wire[rank]
            worker.codec += alike * step.codec[rank]


Spent = list[tuple[float, float, float, float, float]]


def _spent(workers: Sequence[_VirtualWorker]) -> Spent:
    return [(worker.now, worker.waiting, worker.wire, worker.codec, worker.behind) for worker in workers]


def _per_step(before: Spent, after: Spent, steps: int) -> PerStep:
    """A communication thread that falls behind in every period is waited for as long, once the delay is used up."""
    found = [[(b - a) / steps for a, b in zip(*both, strict=True)] for both in zip(before, after, strict=True)]
    seconds, waiting, wire, codec, behind = (fmean(each) for each in zip(*found, strict=True))
    late = max(0.0, behind)
    return PerStep(seconds=seconds + late, waiting=waiting + late, wire=wire, codec=codec)


@dataclass(kw_only=True)
class _VirtualWorker(VirtualCommThread):
    """One rank: its training thread beside its communication thread."""

    pass_seconds: float  # of one backward pass and optimizer step
    crowded: bool  # whether all cores are busy
    now: float = 0.0  # of the training thread
    passes: int = 0  # backward passes by `now`
    waiting: float = 0.0  # seconds so far
    waits: float = 0.0  # when training will wait for the round that the communication thread is at
    under_way: deque[tuple[int, float, float]] = field(default_factory=deque)  # (landing pass, arrival, its seconds)
    #: (begin, end) of computing beside training on a crowded processor, so that either goes half as fast
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
        self._train((passes - self.passes) * self.pass_seconds)
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
