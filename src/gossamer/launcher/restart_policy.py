"""Restart policies: decide which workers start again after a failure: all of them, the failed one, or none.

    RestartAll   a failure of one worker ends all, and all start again together (a fixed run in lock step)
    RestartOne   a lost worker starts again alone, and the others continue (servers, pairwise gossip, elastic runs)

With a budget of 0 restarts, both restart none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from gossamer.launcher.failure import Failure, Outcome, cause

# If a start ends sooner, the next one would likely end in the same way
SETTLED_SECONDS = 10.0
LONGEST_SECONDS = 60.0
STRANDED = "it was lost while no other worker trained, so no worker has parameters to continue from"


class RestartBudget:
    """At most `most` restarts of one process. The first is immediate; later ones wait 1, 2, 4... s, at most
    LONGEST_SECONDS, after each start that lived for less than SETTLED_SECONDS."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self._short_lives = 0  # in a row

    @property
    def exhausted(self) -> bool:
        return self.taken >= self.most

    def take(self, age_seconds: float) -> float:
        """Take one restart. Return the seconds until it. age_seconds: lifetime of the start that has ended."""
        again = self.taken > 0 and age_seconds < SETTLED_SECONDS
        self._short_lives = self._short_lives + 1 if again else 0
        self.taken += 1
        return min(2.0 ** (self._short_lives - 1), LONGEST_SECONDS) if again else 0.0


class SupervisedWorker(Protocol):
    """Interface of one worker over all its restarts, for policies."""

    budget: RestartBudget
    due: float | None  # time of the next start; None if none is due

    @property
    def number(self) -> int: ...
    @property
    def lives(self) -> bool: ...
    @property
    def age_seconds(self) -> float: ...
    @property
    def reported_failure(self) -> bool: ...

    def start(self) -> None: ...
    def ended(self) -> int | None: ...
    def failure(self, exit_code: int, *, stopped: bool = False) -> Failure: ...


W = TypeVar("W", bound=SupervisedWorker)


def failures_of_stopped(workers: Iterable[SupervisedWorker], stopped: Mapping[int, int]) -> list[Failure]:
    """Failures of workers that were asked to end. stopped: exit codes by number."""
    return [
        worker.failure(stopped[worker.number], stopped=True)
        for worker in workers
        if worker.number in stopped and (stopped[worker.number] or worker.reported_failure)
    ]


class RestartPolicy(ABC):
    """Decides about the processes of one supervisor, in its thread.

    ends_whole_run: whether a request to stop this launcher ends the run. Otherwise its workers leave a run that
    continues.
    """

    ends_whole_run = True

    def __init__(self) -> None:
        self.failed: list[Failure] = []  # failures that end the run

    @property
    @abstractmethod
    def restarts(self) -> int: ...

    @property
    def may_save(self) -> bool:
        """Whether the run ends without a failure before it has finished, so that workers get time to save."""
        return False

    @abstractmethod
    def begin(self) -> None:
        """Start the first processes."""

    @abstractmethod
    def look(self, now: float) -> bool:
        """Handle all events since the last call. Return whether the run continues. now: seconds, monotonic."""

    @abstractmethod
    def outcome(self, stopped: Mapping[int, int]) -> Outcome:
        """Return the outcome of the run. stopped: exit codes of the workers that were ended, by number."""


class RestartAll(RestartPolicy):
    """A failure of one worker ends all workers. All start again together, at most `most` times.

    Args:
        workers: filled before `begin`.
        most: budget of restarts.
        stop_all: ends running workers; returns exit codes by number.
        stopping: whether the launcher was asked to stop; then nothing is restarted.
        note: shows a message.
    """

    def __init__(
        self,
        workers: Sequence[SupervisedWorker],
        most: int,
        stop_all: Callable[[], Mapping[int, int]],
        stopping: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._workers, self._most = workers, most
        self._stop_all, self._stopping, self._note = stop_all, stopping, note
        self._restarts = 0

    @property
    def restarts(self) -> int:
        return self._restarts

    def begin(self) -> None:
        for worker in self._workers:
            worker.start()

    def look(self, now: float) -> bool:
        ended = [(worker, exit_code) for worker in self._workers if (exit_code := worker.ended()) is not None]
        failures = [worker.failure(exit_code) for worker, exit_code in ended if exit_code]
        if not failures:
            return any(worker.lives for worker in self._workers)
        failures += failures_of_stopped(self._workers, self._stop_all())
        if self._stopping() and self._restarts < self._most:
            return False
        if self._restarts >= self._most:
            self.failed = failures
            return False
        self._restarts += 1
        self._note(f"{cause(failures)}. Restarting all workers ({self._restarts} of at most {self._most}).")
        self.begin()
        return True

    def outcome(self, stopped: Mapping[int, int]) -> Outcome:
        return Outcome(failure=cause(self.failed) if self.failed else None, restarts=self.restarts)


class RestartOne(RestartPolicy, Generic[W]):
    """A lost worker is restarted alone within its budget; the others continue.

    A worker that ends with exit code 0 has finished. Subclasses decide which failure ends the run at once, and whether
    a restarted worker could continue from the state of others.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note
        self.workers: list[W] = []
        self._finished: set[int] = set()
        self._lost: list[Failure] = []

    @property
    def restarts(self) -> int:
        return sum(worker.budget.taken for worker in self.workers)

    @abstractmethod
    def _is_fatal(self, worker: W, failure: Failure) -> bool:
        """Whether this failure ends the run."""

    @property
    @abstractmethod
    def _is_stranding(self) -> bool:
        """Whether no worker is left with parameters that a restarted one could receive."""

    @property
    @abstractmethod
    def _has_way_back(self) -> bool:
        """Whether a restarted worker would find others to join."""

    @abstractmethod
    def _note_loss(self, worker: W, failure: Failure, wait_seconds: float | None) -> None:
        """Show a loss. wait_seconds: time until the restart; None if the worker is not restarted."""

    def _delay(self, worker: W) -> float:
        """Take a restart of the worker's budget. Return the seconds until it."""
        return worker.budget.take(worker.age_seconds)

    def _start(self, worker: W) -> None:
        worker.start()

    def _start_due(self, now: float) -> None:
        for worker in self.workers:
            if worker.due is not None and worker.due <= now and not self.failed:
                worker.due = None
                self._start(worker)

    def _worker_failed(self, worker: W, failure: Failure, now: float) -> None:
        if self._is_fatal(worker, failure):
            self.failed.append(failure)
            return
        if self._is_stranding:
            self.failed.append(failure if failure.exit_code > 0 else replace(failure, summary=STRANDED))
            return
        self._lost.append(failure)
        wait_seconds = None
        if not worker.budget.exhausted and self._has_way_back and not failure.is_final:
            wait_seconds = self._delay(worker)
            worker.due = now + wait_seconds
        self._note_loss(worker, failure, wait_seconds)

    def _all_lost(self) -> Failure:
        """The last loss, for a run in which no worker has finished."""
        count = len(self.workers)
        return replace(self._lost[-1], summary=f"all {count} workers were lost, this one last" if count > 1 else "")
