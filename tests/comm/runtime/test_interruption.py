"""Ctrl-C in a worker: a session's ranks agree on the step after which it is KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from torch import nn
from torch.optim import SGD

from gossamer.comm.runtime import open_sessions
from gossamer.comm.runtime.interruption import Interruption
from gossamer.errors import Stopped


class Timers:
    """Timers that ring when told to."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.daemon = False

    def __call__(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        self.set.append((seconds, action))
        return cast(threading.Timer, self)

    def start(self) -> None:
        pass


class Session:
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.asked = 0
        self.should_stop = False

    def request_stop(self) -> None:
        self.asked += 1

    def close(self) -> None:
        pass


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
def asked() -> list[str]:
    """Not empty once all workers are being sent the signal."""
    return []


@pytest.fixture
def interruption(timers: Timers, asked: list[str]) -> Iterator[Interruption]:
    before = signal.getsignal(signal.SIGINT)
    installed = Interruption()
    installed.install(10.0, lambda: bool(asked), timers)
    yield installed
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    open_sessions.register(session)
    yield session
    open_sessions.unregister(session)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_sigint_that_is_ignored_stays_ignored(timers: Timers) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Interruption().install(10.0, lambda: False, timers)
        ctrl_c()  # raises nothing
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_a_session_it_is_immediate(interruption: Interruption) -> None:
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_a_session_is_asked_and_raises_it_once(interruption: Interruption, session: Session, timers: Timers) -> None:
    ctrl_c()
    assert session.asked == 1
    assert isinstance(interruption.error(), KeyboardInterrupt)
    assert isinstance(interruption.error(), Stopped)  # asked for by a target that was reached, say
    ((seconds, insist),) = timers.set
    assert (seconds, timers.daemon) == (10.0, True)
    insist()  # and nothing is raised where the script saves


def test_where_no_step_ends_it_is_raised_after_all(
    interruption: Interruption, session: Session, timers: Timers
) -> None:
    ctrl_c()
    ((_, insist),) = timers.set
    with pytest.raises(KeyboardInterrupt):
        insist()
    assert isinstance(interruption.error(), Stopped)


def test_a_loop_that_broke_off_is_left_alone(interruption: Interruption, session: Session, timers: Timers) -> None:
    """As with `if session.should_stop: break`: what stands below the loop goes on."""
    ctrl_c()
    ((_, insist),) = timers.set
    session.should_stop = True
    insist()


def test_training_that_ended_by_itself_does_not_swallow_it(
    interruption: Interruption, session: Session, timers: Timers
) -> None:
    ctrl_c()
    open_sessions.unregister(session)
    ((_, insist),) = timers.set
    with pytest.raises(KeyboardInterrupt):
        insist()


def test_a_second_one_is_immediate(interruption: Interruption, session: Session) -> None:
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    assert session.asked == 1


def test_a_run_that_is_stopped_otherwise_is_not_interrupted(interruption: Interruption) -> None:
    assert isinstance(interruption.error(), Stopped)


def test_who_learns_of_it_from_another_does_not_wait_for_its_own_signal(
    interruption: Interruption, session: Session, asked: list[str], timers: Timers
) -> None:
    asked.append("by the launcher")
    assert isinstance(interruption.error(), KeyboardInterrupt)
    ctrl_c()  # late, while the script saves
    assert not timers.set
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
