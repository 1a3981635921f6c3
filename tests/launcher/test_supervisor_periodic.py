from __future__ import annotations

import signal
import threading

import pytest

from gossamer.comm.runtime.signal_handlers import handling
from gossamer.launcher.supervisor import PeriodicTask


def test_it_acts_beside_the_block_and_once_more_at_its_end() -> None:
    acted, threads = threading.Event(), []

    def act() -> None:
        threads.append(threading.current_thread())
        acted.set()

    with PeriodicTask(0.001, act):
        assert acted.wait(10)
    assert threads[0] is not threading.main_thread()
    assert threads[-1] is threading.main_thread()


def test_an_error_interrupts_the_block_and_is_raised() -> None:
    inside = threading.Event()

    def act() -> None:
        assert inside.wait(10)  # what interrupts the main thread before the block began would interrupt pytest
        raise BrokenPipeError("nobody reads")

    def block() -> None:
        with PeriodicTask(0.001, act):
            inside.set()
            threading.Event().wait(10)

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        block()


def test_an_error_interrupts_a_process_that_ignores_sigint() -> None:
    inside, interrupted = threading.Event(), threading.Event()

    def act() -> None:
        assert inside.wait(10)
        raise BrokenPipeError("nobody reads")

    def block() -> None:
        with PeriodicTask(0.001, act):
            inside.set()
            interrupted.wait(10)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handling(lambda *_: interrupted.set(), signal.SIGTERM), pytest.raises(BrokenPipeError):
            block()
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()
