"""Elastic policy: decides what becomes of an elastic run as the workers of one launcher come, end and fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from gossamer.comm.environment.wait_timeout import duration, waiting_for
from gossamer.launch.coordinator import CoordinatorLink
from gossamer.launch.failure import Failure, Origin, Outcome, cause
from gossamer.launch.process_logs import log_path
from gossamer.launch.restart_policy import SETTLED_SECONDS, RestartOne, SupervisedWorker

RESTART_HINT = " To have lost workers started again, each so often: --max-restarts 5"


class ElasticWorker(SupervisedWorker, Protocol):
    """One place of this launcher, with the processes that hold it one by one. Each start is another member."""

    @property
    def member(self) -> int:
        """The number of its newest start, as a member."""

    @property
    def members(self) -> list[int]: ...
    @property
    def attached(self) -> bool:
        """Whether it lives and has attached."""

    @property
    def has_ever_attached(self) -> bool: ...
    @property
    def holds_state(self) -> bool:
        """Whether it lives and has parameters that others could go on from."""

    @property
    def has_left(self) -> bool:
        """Whether its newest start has left a run that goes on without it."""

    @property
    def is_finishing(self) -> bool:
        """Whether it lives and has come to the end of its script, without having left."""

    @property
    def lost_residual(self) -> str:
        """What the newest start had still to send, as it last told, in words; empty where it told nothing."""


W = TypeVar("W", bound=ElasticWorker)


@dataclass(frozen=True, kw_only=True)
class ElasticOrders:
    """initial: workers to begin with; least: of the run, to go on; patience_seconds: how long fewer wait for others;
    linger_seconds: how long a finished launcher stays for members of others; join_command: what others write to join;
    None beside another launcher's coordinator, which alone ends the run; logs: the folder of the workers' logs."""

    initial: int
    least: int
    patience_seconds: float
    linger_seconds: float
    join_command: str | None
    logs: Path


class ElasticPolicy(RestartOne[W]):
    """Decides. Time is given, and workers are made by `hire(number, initial)`.

    A worker that a signal ends is lost. So is one that ends with an error once training has begun: out of memory on
    one machine is no reason to stop the others. Whoever is lost is started again alone, as its RestartBudget says; the
    others never stop. An error ends the run, as one with a fixed number of workers,
    - before any worker has attached, since every start would meet it;
    - where it is not started again and fewer than `least` are left, or nobody who has parameters;
    - after another worker has finished, since nobody would make good for it.

    A worker that ends with exit code 0 has finished, and the run is over when all have: whoever is lost by then is not
    started again, and whoever is on the way to join is ended. One that has left (Stage.LEFT), because it was put out or
    its machine is wanted back, has not finished.

    Once the coordinator has ended the run, nobody is started again, and those who wait hear it themselves.

    Where fewer than `least` are left, and no start is due, the others wait for `patience_seconds`; then the run ends
    with Outcome.resumable.
    """

    def __init__(
        self,
        orders: ElasticOrders,
        hire: Callable[[int, bool], W],
        coordinator: CoordinatorLink,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(note)
        self._orders, self._hire, self._coordinator = orders, hire, coordinator
        self.ends_whole_run = orders.join_command is not None
        self.in_vain = ""  # why it ended short of workers
        self._short_since: float | None = None
        self._alone_since: float | None = None  # when nobody was left here
        self._have_left = self._hinted = False

    @property
    def may_save(self) -> bool:
        return bool(self.in_vain)

    @property
    def size(self) -> int:
        """Workers of the run, with those that are started again soon."""
        return self._present + self._elsewhere

    @property
    def training(self) -> int:
        """Workers that train together, as far as this launcher hears of it."""
        return len(self._coordinator.members) or self._present

    @property
    def is_finishing(self) -> bool:
        """Whether one has come to its end, so that the others' ends are no news."""
        return self._is_done or any(worker.is_finishing for worker in self.workers)

    def begin(self) -> None:
        self._add(self._orders.initial, initial=not self._coordinator.resumed)

    def look(self, now: float) -> bool:
        """Handle what has happened since the last look, at `now` in seconds; whether the run goes on."""
        for worker in self.workers:
            if (exit_code := worker.ended()) is not None:
                self._worker_ended(worker, exit_code, now)
        for worker in self.workers:
            if worker.due is not None and (self._is_done or self._coordinator.ended):
                worker.due = None
        if not self._is_over:
            self._start_due(now)
        if (asked := self._coordinator.asked()) is not None:
            self._resize(asked)
        if not self._is_done and self._orders.join_command is not None:
            self._watch_least(now)
        return not self._is_over and self._has_work(now)

    def outcome(self, stopped: Mapping[int, int]) -> Outcome:
        restarts = self.restarts
        if self.failed:
            return Outcome(failure=self._cause(), restarts=restarts)
        if self.in_vain:
            return Outcome(resumable=self.in_vain, restarts=restarts)
        joined_and_left = self._orders.join_command is None and self._have_left
        if self._finished or joined_and_left:
            return Outcome(restarts=restarts)
        if self._lost:
            return Outcome(failure=self._all_lost(), restarts=restarts)
        return Outcome(resumable="All workers have left the run before it was finished", restarts=restarts)

    @property
    def _is_done(self) -> bool:
        """Whether training is, so that nobody is waited for any more."""
        return bool(self._finished) or self._coordinator.finishing

    @property
    def _is_over(self) -> bool:
        return bool(self.failed or self.in_vain)

    @property
    def _present(self) -> int:
        return sum(worker.lives or worker.due is not None for worker in self.workers)

    @property
    def _elsewhere(self) -> int:
        """Members that other launchers have."""
        own = {number for worker in self.workers for number in worker.members}
        return sum(number not in own for number in self._coordinator.members)

    @property
    def _begun(self) -> bool:
        return self._elsewhere > 0 or any(worker.has_ever_attached for worker in self.workers)

    def _has_work(self, now: float) -> bool:
        if self._finished and self._begun and not any(worker.attached for worker in self.workers):
            return self._dismiss(now)
        if self._present:
            return True
        return self._elsewhere > 0

    def _dismiss(self, now: float) -> bool:
        """End who is on the way to join, and let other launchers' members say that they have finished, too."""
        for worker in self.workers:
            worker.due = None
        if self._elsewhere == 0:
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now < self._alone_since + self._orders.linger_seconds

    def _add(self, count: int, *, initial: bool = False) -> None:
        """Start workers, first at places that are free."""
        free = [worker for worker in self.workers if not worker.lives and worker.due is None]
        for _ in range(count):
            if not free:
                self.workers.append(self._hire(len(self.workers), initial))
                free = self.workers[-1:]
            self._start(free.pop(0))

    def _start(self, worker: W) -> None:
        worker.start()
        self._coordinator.launched(worker.member)

    def _resize(self, asked: int) -> None:
        size = self.size
        if size < asked and not self._is_done and not self._is_over:
            self._note(f"{asked} workers were asked for, and there are {size}. Starting {asked - size} here.")
            self._add(asked - size)

    def _worker_ended(self, worker: W, exit_code: int, now: float) -> None:
        self._coordinator.gone(worker.member)
        if not exit_code and worker.has_left:
            self._have_left = True
            self._note(f"rank {worker.number} has left the run. {self._going_on()}.{_lost_residual(worker)}")
        elif not exit_code:
            self._finished.add(worker.number)
        else:
            self._worker_failed(worker, worker.failure(exit_code), now)

    def _note_loss(self, worker: W, failure: Failure, wait_seconds: float | None) -> None:
        again = hint = ""
        if wait_seconds is not None:
            when = f" in {wait_seconds:g} s" if wait_seconds else ""
            again = f"; restarting it{when} ({worker.budget.taken} of at most {worker.budget.most})"
        elif not worker.budget.most and not self._hinted and not self._is_done and self.size:
            self._hinted, hint = True, RESTART_HINT
        if not self._begun:
            self._coordinator.expect(self._present)
        log = f" Its log: {log_path(self._orders.logs, worker.number)}" if failure.exit_code > 0 else ""
        self._note(f"{_loss(failure)}. {self._going_on()}{again}.{_lost_residual(worker)}{hint}{log}")

    def _is_fatal(self, worker: W, failure: Failure) -> bool:
        """Whether an error ends the run; signals strand it at most."""
        if failure.exit_code < 0:
            return False
        if not self._begun or (self._is_done and failure.origin is not Origin.ECHO):
            return True
        alone = self._orders.join_command is not None and self.size < self._orders.least
        return alone and worker.budget.exhausted and not self._is_done

    @property
    def _has_way_back(self) -> bool:
        return not (self._is_done or self._coordinator.ended or self._is_without_state)

    @property
    def _is_stranding(self) -> bool:
        return self._is_without_state and self._present > 0

    @property
    def _is_without_state(self) -> bool:
        if not self._begun or self._is_done or self._orders.join_command is None or self._elsewhere:
            return False
        return not any(worker.holds_state for worker in self.workers)

    def _going_on(self) -> str:
        """Of the newest view's members that are left; whoever is on the way to join them does not go on. Before the
        first view, of the processes that are left."""
        left = len(self._coordinator.members) or sum(worker.lives for worker in self.workers)
        if self._orders.join_command is None:
            return "The run goes on without it"
        waits = left < self._orders.least and not self._is_done
        if left == 0:
            return "Nobody is left to train"
        if left == 1:
            return f"The other one {'waits for more' if waits else 'goes on'}"
        return f"The other {left} {'wait for more' if waits else 'go on'}"

    def _watch_least(self, now: float) -> None:
        size, least = self.size, self._orders.least
        if size >= least or not size or self._is_over:
            self._short_since = None
            return
        count = f"{size} worker{'s' * (size > 1)} of at least {least}"
        if self._short_since is None:
            self._short_since = now
            self._note(
                f"{count} {'are' if size > 1 else 'is'} left, so training waits for others, "
                f"{waiting_for(self._orders.patience_seconds)}. They join by: {self._orders.join_command}"
            )
        if now >= self._short_since + self._orders.patience_seconds:
            were = "were" if size > 1 else "was"
            self.in_vain = f"{count} {were} left, and nobody joined within {duration(self._orders.patience_seconds)}"

    def _cause(self) -> Failure:
        """The first of the errors that the last one is likely a repetition of."""
        last = self.failed[-1]
        if last.exit_code < 0:
            return last
        same = [each for each in self._lost if each.exit_code > 0 and last.moment - each.moment < SETTLED_SECONDS]
        return cause([*same, last])

    def _all_lost(self) -> Failure:
        last = self._lost[-1]
        count = len(self.workers)
        if last.exit_code > 0 or count == 1:
            self.failed.append(last)
            return self._cause()
        return super()._all_lost()


def _lost_residual(worker: ElasticWorker) -> str:
    told = worker.lost_residual
    return f" {told}." if told else ""


def _loss(failure: Failure) -> str:
    if failure.exit_code > 0 and failure.summary:
        return f"rank {failure.rank} failed: {failure.summary} ({failure.ending})"
    return f"rank {failure.rank} was lost ({failure.ending})"
