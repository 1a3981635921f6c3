"""Restart policies in virtual time: which workers start again, how soon, and how the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from gossamer.launcher.failure import Failure, Origin, Outcome
from gossamer.launcher.restart_policy import LONGEST_SECONDS, RestartAll, RestartBudget

KILLED = -9


@dataclass
class Worker:
    number: int
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    due: float | None = None
    lives: bool = False
    starts: int = 0
    exit_code: int | None = None
    reported_failure: bool = False
    age_seconds: float = 0.0

    def start(self) -> None:
        self.lives, self.starts = True, self.starts + 1

    def ended(self) -> int | None:
        exit_code, self.exit_code = self.exit_code, None
        self.lives = self.lives and exit_code is None
        return exit_code

    def failure(self, exit_code: int, *, stopped: bool = False) -> Failure:
        origin = Origin.RAISED if not stopped or self.reported_failure else Origin.STOPPED
        return Failure(rank=self.number, exit_code=exit_code, moment=float(self.number), origin=origin)


class Run:
    """Workers that restart together. stopped: exit codes of workers that the launcher ends, -SIGTERM unless given."""

    def __init__(self, workers: int, most: int) -> None:
        self.workers = [Worker(number) for number in range(workers)]
        self.notes: list[str] = []
        self.stopped: dict[int, int] = {}
        self.stopping = False
        self.policy = RestartAll(self.workers, most, self._stop_all, lambda: self.stopping, self.notes.append)
        self.policy.begin()

    def _stop_all(self) -> Mapping[int, int]:
        living = [worker for worker in self.workers if worker.lives]
        for worker in living:
            worker.lives = False
        return {worker.number: self.stopped.get(worker.number, -15) for worker in living}

    def look(self) -> bool:
        return self.policy.look(0.0)

    @property
    def starts(self) -> list[int]:
        return [worker.starts for worker in self.workers]


def check_one_failure_restarts_all(run: Run) -> None:
    run.workers[1].exit_code = KILLED
    assert run.look()
    assert run.starts == [2, 2, 2]
    assert all(worker.lives for worker in run.workers)
    (note,) = run.notes
    assert "rank 1 failed" in note
    assert "Restarting all workers (1 of at most 2)" in note


def test_one_failure_restarts_all_workers() -> None:
    check_one_failure_restarts_all(Run(3, most=2))


def test_negative_control_a_policy_that_restarts_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(3, most=2)
    monkeypatch.setattr(RestartAll, "begin", lambda policy: run.workers[1].start())
    with pytest.raises(AssertionError):
        check_one_failure_restarts_all(run)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_restarts_end_with_the_budget_and_the_first_cause(most: int) -> None:
    run = Run(2, most)
    for _ in range(most):
        run.workers[0].exit_code = 1
        assert run.look()
    run.workers[1].exit_code = 7
    assert not run.look()
    outcome = run.policy.outcome({})
    assert (outcome.restarts, outcome.exit_code) == (most, 7)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert run.starts == [most + 1] * 2


def test_a_worker_that_reported_its_failure_while_it_was_ended_may_be_the_cause() -> None:
    run = Run(2, most=0)
    run.workers[0].reported_failure, run.stopped = True, {0: 0}
    run.workers[1].exit_code = 3
    assert not run.look()
    outcome = run.policy.outcome({})
    assert outcome.failure is not None
    assert outcome.failure.rank == 0


def test_nothing_restarts_after_a_request_to_stop() -> None:
    run = Run(2, most=5)
    run.workers[0].exit_code, run.stopping = 1, True
    assert not run.look()
    assert run.starts == [1, 1]
    assert (run.policy.failed, run.policy.restarts) == ([], 0)


def test_the_run_ends_well_when_all_have_finished() -> None:
    run = Run(2, most=5)
    run.workers[0].exit_code = 0
    assert run.look()
    run.workers[1].exit_code = 0
    assert not run.look()
    assert run.policy.outcome({}) == Outcome()


def test_a_budget_waits_longer_after_each_short_life() -> None:
    budget = RestartBudget(12)
    waits = [budget.take(0.5) for _ in range(9)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_SECONDS, LONGEST_SECONDS]
    assert budget.take(60.0) == 0.0
    assert budget.take(0.5) == 1.0
    assert not budget.exhausted
    budget.take(60.0)
    assert budget.exhausted
