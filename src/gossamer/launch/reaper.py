"""Ends the workers that do not end by themselves once the run is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from gossamer.launch.files import RunFiles, read_json

PATIENCE_SECONDS = 2.5


class Reaper:
    """Whoever is still there `patience_seconds` after the first failure, or a request to stop, is killed.

    The engine asks politely and waits up to 30 seconds; a worker blocked in native code, with a signal
    handler of its own, would make everyone wait that long. Every worker leads a process group: its helpers end with it.
    """

    def __init__(
        self,
        files: RunFiles,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._lock = threading.RLock()  # the engine's thread begins and ends, another one looks
        self._deadline: float | None = None
        self._attempt = 0
        self._pids: dict[int, int] = {}
        self._waiting: set[int] = set()
        self.died: dict[int, tuple[int, float]] = {}
        self.killed: set[int] = set()

    def begin(self, attempt: int, ranks: range) -> None:
        """A new attempt: nobody of the one before stays."""
        with self._lock:
            self.end()
            self._deadline = None
            self._attempt = attempt
            self._pids = {}
            self._waiting = set(ranks)
            self.died = {}
            self.killed = set()

    def stop(self) -> None:
        """From now on the workers are expected to end."""
        if self._deadline is None:
            self._deadline = self._clock() + self._patience_seconds

    def look(self) -> None:
        with self._lock:
            self._learn()
            for rank, pid in self._pids.items():
                exit_code = _peek(pid)
                if exit_code:
                    self.died.setdefault(rank, (exit_code, time.time()))
                if exit_code or self._files.failure(rank, self._attempt).exists():
                    self.stop()
            if self._deadline is not None and self._clock() > self._deadline:
                self.killed |= {rank for rank, pid in self._pids.items() if _runs(pid)}
                self.end()

    def end(self) -> None:
        """Kill what is left, helpers whose worker has ended already among it."""
        with self._lock:
            self._learn()
            for pid in self._pids.values():
                try:
                    os.killpg(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def _learn(self) -> None:
        for rank in tuple(self._waiting):
            started = read_json(self._files.started(rank, self._attempt))
            if started is not None:
                self._pids[rank] = started["pid"]
                self._waiting.discard(rank)


def _peek(pid: int) -> int | None:
    """The exit code of a worker that has ended, negative for a signal; the engine still gets to collect it.

    None for one that runs, and for one that the engine has collected already: then it has acted upon it.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _peek(pid) is None
