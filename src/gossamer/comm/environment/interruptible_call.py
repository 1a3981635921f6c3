"""Interruptible call: runs a blocking call of torch's in a thread, so that the caller hears of more than its end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
POLL_SECONDS = 0.02


def interruptible(call: Callable[[], T], look: Callable[[], None], settling_seconds: float = 0.0) -> T:
    """The result of `call`, or what it raises; Ctrl-C, or what `look` raises, called every 20 ms, ends the wait before.

    settling_seconds: that the interpreter waits at its end for a call that was left alone. One that comes back from
    torch after that aborts the process.
    """
    results: list[T] = []
    problems: list[BaseException] = []
    done = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            results.append(call())
        except BaseException as problem:
            problems.append(problem)
        done.set()

    thread = threading.Thread(target=run, name="gossamer-join", daemon=True)
    thread.start()
    try:
        while not done.wait(POLL_SECONDS):
            look()
    except BaseException:
        atexit.register(thread.join, settling_seconds)
        raise
    if problems:
        raise problems[0]
    return results[0]
