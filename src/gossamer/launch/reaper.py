"""Reaper: kills the workers that have not ended a grace period after the run was over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from gossamer.launch.logs.run_files import RunFiles, read_json
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process import signal_group

GRACE_SECONDS = 2.5
POLL_SECONDS = 0.02


class Reaper:
    """Kills the workers that are left `grace_seconds` after the first failure, or after a request to stop.

    The engine sends SIGTERM and waits up to 30 seconds; a worker blocked in native code, with a signal handler of its
    own, would delay the end that long. Every worker leads a process group: its helpers end with it.
    """

    def __init__(
        self,
        files: RunFiles,
        grace_seconds: float = GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        orphan_reaper: OrphanReaper | None = None,
    ) -> None:
        self._orphan_reaper = orphan_reaper
        self._files = files
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._lock = threading.RLock()  # the engine's thread begins and ends, others look and watch
        self._deadline: float | None = None
        self._attempt = 0
        self._pids: dict[int, int] = {}
        self._watchers: dict[int, threading.Thread] = {}
        self._not_started: set[int] = set()
        self._ended: set[int] = set()
        self._requested = False
        self.died: dict[int, tuple[int, float]] = {}
        self.killed: set[int] = set()
        self.unprompted: set[int] = set()  # those that died before any other did and before a request to stop

    def begin(self, attempt: int, ranks: range) -> None:
        """A new attempt: kill what is left of the one before."""
        with self._lock:
            self.end()
            self._deadline = None
            self._attempt = attempt
            self._pids = {}
            self._watchers = {}
            self._not_started = set(ranks)
            self._ended = set()
            self.died = {}
            self.killed = set()
            self.unprompted = set()

    def request_stop(self) -> None:
        """As `stop`, because the launcher was asked to: whoever ends from now on is no cause of it."""
        self._requested = True
        self.stop()

    def stop(self) -> None:
        """Begin the grace period."""
        if self._deadline is None:
            self._deadline = self._clock() + self._grace_seconds

    def look(self) -> None:
        with self._lock:
            self._find_started()
            if any(self._files.failure(rank, self._attempt).exists() for rank in self._pids):
                self.stop()
            if self._deadline is not None and self._clock() > self._deadline:
                self.killed |= set(self._pids) - self._ended
                self.end()

    def end(self) -> None:
        """Kill what is left, and helpers of workers that have ended."""
        with self._lock:
            self._find_started()
            for pid in self._pids.values():
                signal_group(pid, signal.SIGKILL)

    def _find_started(self) -> None:
        for rank in tuple(self._not_started):
            started = read_json(self._files.started(rank, self._attempt))
            if started is not None:
                self._pids[rank] = started["pid"]
                if self._orphan_reaper is not None:
                    self._orphan_reaper.add(started["pid"])
                self._not_started.discard(rank)
                watcher = threading.Thread(target=self._watch, args=(rank, started["pid"], self._attempt), daemon=True)
                self._watchers[rank] = watcher
                watcher.start()

    def _watch(self, rank: int, pid: int, attempt: int) -> None:
        """A thread for each worker, since the engine collects the ended within a fraction of a second."""
        exit_code = await_end(pid)
        if self._orphan_reaper is not None:
            self._orphan_reaper.remove(pid)
        with self._lock:
            if attempt != self._attempt:
                return
            self._ended.add(rank)
            if exit_code and not self.died and not self._requested:
                self.unprompted.add(rank)
            if exit_code:
                self.died[rank] = (exit_code, time.time())
            if exit_code or (exit_code is None and not self._files.finished(rank, attempt).exists()):
                self.stop()


def _look_at_end(pid: int) -> int | None:
    """Wait until a worker has ended; its exit code, negative for a signal, or None where it is not known.

    The engine still gets to collect it. If it was faster, the exit code is not known.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _await_collection(pid: int) -> None:
    """The same where the system cannot look without collecting: wait until the engine has collected the worker."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_SECONDS)


await_end: Callable[[int], int | None] = _look_at_end if hasattr(os, "waitid") else _await_collection
