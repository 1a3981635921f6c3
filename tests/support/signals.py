"""Signals that a launcher was started to ignore."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gossamer.launcher.failure import Outcome


class LaunchedRun(Protocol):
    """Any launcher's run of a script that prints a line, then waits for the file `hung-up`."""

    directory: Path
    lines: list[tuple[int, str]]
    tick: Callable[[], Any]


def check_ignored_hangup(run: LaunchedRun, launch: Callable[[], Outcome]) -> None:
    """The run ends by itself although its launcher, which ignores SIGHUP, is sent one while a worker runs."""

    def tick() -> None:
        if run.lines and not (run.directory / "hung-up").exists():
            os.kill(os.getpid(), signal.SIGHUP)
            (run.directory / "hung-up").touch()

    run.tick = tick
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch() == Outcome()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
