"""Interruptible call: runs a blocking torch call in a thread, so that other events can interrupt the wait."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.2  # the first and the longest pause: many workers share few cores


def interruptible(call: Callable[[], T], look: Callable[[], None], settling_seconds: float = 0.0) -> T:
    """Run `call` in a thread, and return its result or raise its exception.

    Args:
        call: The blocking call.
        look: Called after 20 ms, and then at intervals that double until 0.2 s. An exception that it raises ends the
            wait, like Ctrl-C.
        settling_seconds: How long the interpreter waits at exit for an abandoned call. If such a call returns from
            torch after the interpreter has shut down, the process aborts.
    """
    results: list[T] = []
    problems: list[BaseException] = []
    done = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is per thread
            results.append(call())
        except BaseException as problem:
            problems.append(problem)
        done.set()

    thread = threading.Thread(target=run, name="gossamer-join", daemon=True)
    thread.start()
    try:
        pause = POLL_SECONDS
        while not done.wait(pause):
            look()
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
    except BaseException:
        atexit.register(thread.join, settling_seconds)
        raise
    if problems:
        raise problems[0]
    return results[0]
