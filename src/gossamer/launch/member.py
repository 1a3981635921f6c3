"""One place of a run, worker or server, and the processes that hold it one after another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from gossamer.launch.files import RunFiles, write_json
from gossamer.launch.guard import Guard

POLL_SECONDS = 0.02


class Member:
    """At most one process at a time, which leads a process group: its helpers end with it.

    number: in the run's files; command: what is run, after `prefix`, in which ${local_rank} stands for the number;
    environment(attempt): the whole of it; guard: ends the processes if this one cannot.
    """

    def __init__(
        self,
        number: int,
        files: RunFiles,
        guard: Guard,
        command: Sequence[str],
        environment: Callable[[int], Mapping[str, str]],
        prefix: Sequence[str] = (),
    ) -> None:
        there = [part.replace("${local_rank}", str(number)) for part in prefix]
        self.number = number
        self.attempt = -1
        self._files = files
        self._guard = guard
        self._command = [*there, *command]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    @property
    def lives(self) -> bool:
        """Until its end has been taken notice of."""
        return self._process is not None

    @property
    def age_seconds(self) -> float:
        """Since the latest start."""
        return time.monotonic() - self._began

    def start(self) -> None:
        self.attempt += 1
        self._began = time.monotonic()
        output, boot = (
            path(self.number, self.attempt).open("wb", buffering=0) for path in (self._files.output, self._files.boot)
        )
        with output, boot:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment(self.attempt),
                stdout=output,
                stderr=boot,
                start_new_session=True,
            )
        self._guard.add(self._process.pid)
        # Whoever lets faults happen finds the process there
        started = {"pid": self._process.pid, "host": socket.gethostname(), "moment": time.time()}
        write_json(self._files.started(self.number, self.attempt), started)

    def ended(self) -> int | None:
        """The exit code, negative for a signal's number, told once; None while it lives or is not there."""
        if self._process is None or (exit_code := self._process.poll()) is None:
            return None
        self._signal(signal.SIGKILL)  # its helpers
        self._guard.remove(self._process.pid)
        self._process = None
        return exit_code

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self) -> int | None:
        """Until a process that was killed is gone; as `ended`."""
        if self._process is not None:
            self._process.wait()
        return self.ended()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def end_all(members: Sequence[Member], patience_seconds: float, hurried: Callable[[], bool]) -> dict[int, int]:
    """Ask politely, kill whoever is still there after `patience_seconds` or when `hurried()`; exit codes by number."""
    alive = [member for member in members if member.lives]
    for member in alive:
        member.ask_to_end()
    exit_codes: dict[int, int] = {}
    deadline = time.monotonic() + patience_seconds
    while alive and time.monotonic() < deadline and not hurried():
        ended = {member.number: exit_code for member in alive if (exit_code := member.ended()) is not None}
        alive = [member for member in alive if member.lives]
        exit_codes |= ended
        if not ended:
            time.sleep(POLL_SECONDS)
    for member in alive:
        member.kill()
    for member in alive:
        exit_code = member.wait()
        exit_codes[member.number] = -signal.SIGKILL if exit_code is None else exit_code
    return exit_codes
