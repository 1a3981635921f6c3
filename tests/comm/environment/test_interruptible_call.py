"""Blocking calls that are not waited for to the end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gossamer.comm.environment.interruptible_call import interruptible


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    ends = threading.Event()
    yield ends
    ends.set()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given))
    return registered


def nothing() -> None:
    pass


def test_the_result_or_the_error_is_the_calls_own(at_exit: list[tuple[Any, ...]]) -> None:
    assert interruptible(lambda: 7, nothing) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0, nothing)
    assert at_exit == []


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ConnectionError])
def test_what_is_seen_meanwhile_ends_the_wait_at_once(
    blocked: threading.Event, at_exit: list[tuple[Any, ...]], problem: type[BaseException]
) -> None:
    def look() -> None:
        raise problem

    with pytest.raises(problem):
        interruptible(lambda: blocked.wait(30), look, settling_seconds=1.5)
    ((join, seconds),) = at_exit
    assert seconds == 1.5
    assert is_join_of_a_daemon(join)


def is_join_of_a_daemon(join: Callable[..., None]) -> bool:
    thread = getattr(join, "__self__", None)
    return isinstance(thread, threading.Thread) and thread.daemon and thread.is_alive()


def test_it_looks_again_and_again(blocked: threading.Event) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            blocked.set()

    assert interruptible(lambda: blocked.wait(30), look)
    assert len(looks) >= 3  # once more where the call's thread is not told at once
