"""Elastic policy: decides when one launcher of an elastic run starts, restarts and stops workers, and ends the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from gossamer.comm.environment.wait_timeout import duration, waiting_for
from gossamer.launcher.coordinator import CoordinatorLink
from gossamer.launcher.failure import Failure, Origin, Outcome, cause
from gossamer.launcher.process_logs import log_path
from gossamer.launcher.restart_policy import SETTLED_SECONDS, RestartOne, SupervisedWorker

RESTART_HINT = " To restart each lost worker up to 5 times: --max-restarts 5"


class ElasticWorker(SupervisedWorker, Protocol):
    """One worker slot of this launcher over all its restarts. Each start is a new member of the run."""

    @property
    def member(self) -> int:
        """Member number of the newest start."""

    @property
    def members(self) -> list[int]: ...
    @property
    def attached(self) -> bool:
        """Whether its process is running and has attached a session."""

    @property
    def has_ever_attached(self) -> bool: ...
    @property
    def holds_state(self) -> bool:
        """Whether its process is running and has parameters that a newcomer could receive."""

    @property
    def has_left(self) -> bool:
        """Whether its newest start has left the run while the run continues."""

    @property
    def is_finishing(self) -> bool:
        """Whether its process is running and has finished its script, without having left the run."""

    @property
    def lost_residual(self) -> str:
        """Last reported residual of the newest start, as a sentence; empty if it reported none."""


W = TypeVar("W", bound=ElasticWorker)


@dataclass(frozen=True, kw_only=True)
class ElasticOrders:
    """Settings of one launcher of an elastic run.

    Args:
        initial: number of workers to start at first.
        least: minimum number of workers of the run. With fewer, training waits.
        patience_seconds: how long training waits for more workers.
        linger_seconds: how long a finished launcher waits for members of other launchers.
        join_command: the command that adds workers from another machine; None for a launcher that joined the run.
            Only the launcher that runs the coordinator ends the run.
        logs: folder of the workers' logs.
        served: whether servers have the parameters. Then no worker waits for another one, and a restarted worker can
            continue after the loss of all others.
    """

    initial: int
    least: int
    patience_seconds: float
    linger_seconds: float
    join_command: str | None
    logs: Path
    served: bool = False


class ElasticPolicy(RestartOne[W]):
    """Restart policy of an elastic run. `hire(number, initial)` makes workers; the caller passes the time.

    A worker is lost if a signal ends it, or if it fails after training has begun: one machine that is out of memory
    does not stop the others. A lost worker is restarted alone within its RestartBudget; the others continue. A failure
    ends the run, as in a run with a fixed number of workers,
    - before any worker has attached, since every start would fail in the same way;
    - if the worker is not restarted and fewer than `least` workers, or none with parameters, remain;
    - after another worker has finished, since no worker would make up for the loss.

    A worker that ends with exit code 0 has finished. The run ends when all have finished: workers that are lost by then
    are not restarted, and workers that are still joining are ended. A worker that has left (Stage.LEFT), because it was
    evicted or its machine is needed elsewhere, has not finished.

    After the coordinator has ended the run, no worker is restarted, and waiting workers learn it from the coordinator.

    If fewer than `least` workers are left and no restart is due, the others wait for `patience_seconds`. Then the run
    ends with Outcome.resumable.
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
        self.in_vain = ""  # why the run ended with too few workers
        self._short_since: float | None = None
        self._alone_since: float | None = None  # since when no worker is left in this launcher
        self._have_left = self._hinted = False

    @property
    def may_save(self) -> bool:
        return bool(self.in_vain)

    @property
    def size(self) -> int:
        """Number of workers of the run, including those with a restart due."""
        return self._present + self._elsewhere

    @property
    def training(self) -> int:
        """Number of workers that train together, as far as this launcher knows."""
        return len(self._coordinator.members) or self._present

    @property
    def is_finishing(self) -> bool:
        """Whether a worker has finished its script, so that ends of other workers are expected."""
        return self._is_done or any(worker.is_finishing for worker in self.workers)

    def begin(self) -> None:
        self._add(self._orders.initial, initial=not self._coordinator.resumed)

    def look(self, now: float) -> bool:
        """Handle all events since the last call. Return whether the run continues. now: seconds."""
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
        """Whether a worker has finished, so that the run waits for no further workers."""
        return bool(self._finished) or self._coordinator.finishing

    @property
    def _is_over(self) -> bool:
        return bool(self.failed or self.in_vain)

    @property
    def _present(self) -> int:
        return sum(worker.lives or worker.due is not None for worker in self.workers)

    @property
    def _elsewhere(self) -> int:
        """Number of members that other launchers started."""
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
        """Cancel joining workers, and wait up to linger_seconds for other launchers' members to finish, too."""
        for worker in self.workers:
            worker.due = None
        if self._elsewhere == 0:
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now < self._alone_since + self._orders.linger_seconds

    def _add(self, count: int, *, initial: bool = False) -> None:
        """Start workers, in free slots first."""
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
            self._note(f"{asked} workers were requested, and the run has {size}. Starting {asked - size} here.")
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
        """Whether an error ends the run. A signal alone is never fatal."""
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
        if self._orders.served:
            return False
        return not any(worker.holds_state for worker in self.workers)

    def _going_on(self) -> str:
        """State of the remaining workers as a sentence: members of the newest view, or processes before the first."""
        left = len(self._coordinator.members) or sum(worker.lives for worker in self.workers)
        if self._orders.join_command is None:
            return "The run continues without it"
        waits = left < self._orders.least and not self._is_done and not self._orders.served
        if left == 0:
            return "No worker is left to train"
        if left == 1:
            return f"The other one {'waits for more' if waits else 'continues'}"
        return f"The other {left} {'wait for more' if waits else 'continue'}"

    def _watch_least(self, now: float) -> None:
        size, least = self.size, self._orders.least
        if size >= least or not size or self._is_over:
            self._short_since = None
            return
        count = f"{size} worker{'s' * (size > 1)} of at least {least}"
        if self._short_since is None:
            self._short_since = now
            effect = "the run ends without" if self._orders.served else "training waits for"
            self._note(
                f"{count} {'are' if size > 1 else 'is'} left, so {effect} more workers, "
                f"{waiting_for(self._orders.patience_seconds)}. To add some: {self._orders.join_command}"
            )
        if now >= self._short_since + self._orders.patience_seconds:
            were = "were" if size > 1 else "was"
            self.in_vain = f"{count} {were} left, and no worker joined within {duration(self._orders.patience_seconds)}"

    def _cause(self) -> Failure:
        """The first error within SETTLED_SECONDS before the last one, which likely repeats it."""
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
    lost = worker.lost_residual
    return f" {lost}." if lost else ""


def _loss(failure: Failure) -> str:
    if failure.exit_code > 0 and failure.summary:
        return f"rank {failure.rank} failed: {failure.summary} ({failure.ending})"
    return f"rank {failure.rank} was lost ({failure.ending})"
