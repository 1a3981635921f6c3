"""One supervisor for all policies: signals, errors and ends, with policies that start no process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles
from gossamer.launcher.failure import Failure, Origin, Outcome
from gossamer.launcher.restart_policy import RestartPolicy
from gossamer.launcher.supervisor import Supervisor

pytestmark = pytest.mark.processes  # the guard of orphans is one
FAILURE = Failure(rank=0, exit_code=3, moment=0.0, origin=Origin.RAISED)


class Scripted(RestartPolicy):
    """A policy that calls `first` at its beginning, and then `each` until it returns False."""

    restarts = 2

    def __init__(self, first: Callable[[], None] = lambda: None, each: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._first, self._each = first, each

    def begin(self) -> None:
        self._first()

    def look(self, now: float) -> bool:
        return self._each()

    def outcome(self, stopped: Mapping[int, int]) -> Outcome:
        return Outcome(failure=self.failed[0] if self.failed else None, restarts=self.restarts)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, notes: list[str]) -> Supervisor:
    return Supervisor(RunFiles(tmp_path), 30.0, notes.append, lambda: None)


def interrupt() -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return True


def test_a_run_ends_when_its_policy_says_so(supervisor: Supervisor) -> None:
    closed: list[bool] = []
    supervisor.at_end.callback(lambda: closed.append(True))
    assert supervisor.run(Scripted()) == Outcome(restarts=2)
    assert closed == [True]
    assert not supervisor.files.stopping.exists()


def test_a_signal_ends_the_run_and_tells_the_workers(supervisor: Supervisor) -> None:
    assert supervisor.run(Scripted(each=interrupt)) == Outcome(signal=signal.SIGINT, restarts=2)
    assert supervisor.files.stopping.exists()
    assert supervisor.files.interrupted.exists()


def test_a_signal_interrupts_a_wait_for_other_machines(supervisor: Supervisor) -> None:
    """As a rendezvous, which may take half an hour."""
    looked: list[bool] = []

    def wait() -> None:
        with supervisor.waiting():
            interrupt()
            threading.Event().wait(60)

    assert supervisor.run(Scripted(wait, lambda: bool(looked.append(True)))).signal == signal.SIGINT
    assert not looked


def test_a_failure_is_the_outcome_though_a_signal_comes_with_it(supervisor: Supervisor) -> None:
    def fail() -> bool:
        policy.failed.append(FAILURE)
        return interrupt()

    policy = Scripted(each=fail)
    assert supervisor.run(policy) == Outcome(failure=FAILURE, restarts=2)


def test_workers_that_leave_a_run_are_not_told_that_it_ends(supervisor: Supervisor, notes: list[str]) -> None:
    policy = Scripted(each=interrupt)
    policy.ends_whole_run = False
    assert supervisor.run(policy).signal == signal.SIGINT
    assert not supervisor.files.stopping.exists()
    (note,) = notes
    assert "leaving the run" in note


def test_an_error_of_a_policy_ends_everything_and_is_raised(supervisor: Supervisor) -> None:
    closed: list[bool] = []
    supervisor.at_end.callback(lambda: closed.append(True))

    def fails() -> bool:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        supervisor.run(Scripted(each=fails))
    assert closed == [True]
