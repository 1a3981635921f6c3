"""Managed process: runs one worker or server of a run, over all its restarts; and a standby that replaces a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gossamer.base.run_files import RunFiles, Stage, read_json, write_json
from gossamer.launch.failure import Failure, from_exit, from_report
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.process_logs import ProcessLog
from gossamer.launch.restart_policy import RestartBudget

POLL_SECONDS = 0.02
# For those that are left when one has failed: nothing to save in lock step, but a handler of SIGTERM gets its time
FAILURE_GRACE_SECONDS = 5.0

# Processes that start at this moment have more use for the CPU
STANDBY_DELAY_SECONDS = 1.0

Spawn = Callable[[Sequence[str], Mapping[str, str], Path, Path], subprocess.Popen[bytes]]


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    boot: Path,
    given: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that leads a group of its own. output, boot: files for stdout and stderr; given: its stdin."""
    with output.open("wb", buffering=0) as out, boot.open("wb", buffering=0) as errors:
        return subprocess.Popen(
            command, env=environment, stdin=given, stdout=out, stderr=errors, start_new_session=True
        )


def signal_group(leader: int, number: signal.Signals) -> None:
    """Signal the process group of `leader`, as far as it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def placed(number: int, prefix: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command after its prefix, for the process of this number."""
    return [*(part.replace("${local_rank}", str(number)) for part in prefix), *command]


class ManagedProcess:
    """At most one process at a time, which leads a process group: its helpers end with it.

    number: in the run's files; command: run after `prefix`, in which ${local_rank} stands for the number;
    environment(attempt): all of it; log: of what it prints, over all attempts; orphan_reaper: ends the processes if
    this one cannot; most_restarts: the budget for a policy that restarts it alone; begin: starts a process.
    """

    def __init__(
        self,
        number: int,
        files: RunFiles,
        orphan_reaper: OrphanReaper,
        command: Sequence[str],
        environment: Callable[[int], Mapping[str, str]],
        log: ProcessLog,
        prefix: Sequence[str] = (),
        most_restarts: int = 0,
        begin: Spawn = spawn,
    ) -> None:
        self.number = number
        self.attempt = -1
        self.log = log
        self.budget = RestartBudget(most_restarts)
        self.due: float | None = None  # when it starts again
        self._files = files
        self._orphan_reaper = orphan_reaper
        self._command = placed(number, prefix, command)
        self._environment = environment
        self._begin = begin
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._stopped = 0.0, False  # whether it was asked to end

    @property
    def lives(self) -> bool:
        """Whether it was started and its end has not been seen."""
        return self._process is not None

    @property
    def entered(self) -> bool:
        """Whether it has imported everything and runs a script."""
        return self._files.has_reached(Stage.ENTERED, self.number)

    @property
    def age_seconds(self) -> float:
        """Since the latest start."""
        return time.monotonic() - self._began

    @property
    def reported_failure(self) -> bool:
        return self._files.failure(self.number, self.attempt).exists()

    def start(self) -> None:
        self.log.begin(self.attempt + 1)
        self.attempt += 1
        self._began, self._stopped = time.monotonic(), False
        output, boot = (path(self.number, self.attempt) for path in (self._files.output, self._files.boot))
        self._process = self._begin(self._command, self._environment(self.attempt), output, boot)
        self._orphan_reaper.add(self._process.pid)
        self._files.report_start(self.number, self.attempt, self._process.pid)

    def ended(self) -> int | None:
        """The exit code, negative for a signal's number, once; None while it lives or was not started."""
        if self._process is None or (exit_code := self._process.poll()) is None:
            return None
        self._signal(signal.SIGKILL)  # its helpers
        self._orphan_reaper.remove(self._process.pid)
        self._process = None
        self._report_exit(exit_code)
        return exit_code

    def failure(self, exit_code: int, *, stopped: bool = False) -> Failure:
        """Why the newest start failed, by its own report or by its exit code; the log gets it, too."""
        report = read_json(self._files.failure(self.number, self.attempt))
        found = from_report(report) if report else from_exit(self.number, exit_code, time.time(), stopped)
        self.log.note(found.traceback or str(found))
        return found

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the process alone: while it saves it needs its helpers, which end with it."""
        if self._process is not None:
            self._stopped = True
            self._process.send_signal(number)

    def kill(self) -> None:
        self._stopped = True
        self._signal(signal.SIGKILL)

    def wait(self) -> int | None:
        """Until a process that was killed is gone; as `ended`."""
        if self._process is not None:
            self._process.wait()
        return self.ended()

    def _report_exit(self, exit_code: int) -> None:
        """For who keeps the run's store, which the run does not depend on."""
        how = from_exit(self.number, exit_code, time.time(), stopped=self._stopped)
        summary = str(how) if exit_code else ""
        report = {"exit_code": exit_code, "moment": how.moment, "summary": summary, "stopped": self._stopped}
        with contextlib.suppress(OSError):
            write_json(self._files.exited(self.number, self.attempt), report)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            signal_group(self._process.pid, number)


def end_all(
    processes: Sequence[ManagedProcess],
    grace_seconds: float | None = None,
    number: signal.Signals = signal.SIGTERM,
    hurried: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Ask all to end, by a signal, and kill what is left after `grace_seconds` (FAILURE_GRACE_SECONDS) or when
    `hurried()`; exit codes by number.

    SIGINT is for those that run a script, which it interrupts; in one that still imports it would be a traceback.
    """
    alive = [process for process in processes if process.lives]
    for process in alive:
        process.ask_to_end(number if process.entered else signal.SIGTERM)
    exit_codes: dict[int, int] = {}
    deadline = time.monotonic() + (FAILURE_GRACE_SECONDS if grace_seconds is None else grace_seconds)
    while alive and time.monotonic() < deadline and not hurried():
        ended = {process.number: exit_code for process in alive if (exit_code := process.ended()) is not None}
        alive = [process for process in alive if process.lives]
        exit_codes |= ended
        if not ended:
            time.sleep(POLL_SECONDS)
    for process in alive:
        process.kill()
    for process in alive:
        exit_code = process.wait()
        exit_codes[process.number] = -signal.SIGKILL if exit_code is None else exit_code
    return exit_codes


class StandbyProcess:
    """At most one process that waits on its standard input for a line of JSON: the environment it does not have yet.

    A server that is started from nothing imports for five seconds on an idle machine, and for fifteen on a busy one,
    while all workers wait; a standby listens within a fraction of a second. Its cost meanwhile: no CPU time, and 315 MB
    of resident memory, of which 90 MB are files that the other processes have in memory, too.

    command: what it runs, empty for no standby; output, boot: files for what it prints until it is taken. It ends when
    its input does, and by `orphan_reaper`, so that it outlives no launcher.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        boot: Path,
        orphan_reaper: OrphanReaper,
    ) -> None:
        self._command, self._environment, self._output, self._boot = command, environment, output, boot
        self._orphan_reaper = orphan_reaper
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._delay()

    def look(self) -> None:
        """Start one where there is none, a moment after the last was taken or anything else began."""
        if self._process is not None or not self._command or time.monotonic() < self._due:
            return
        self._delay()
        with contextlib.suppress(OSError):  # no memory, perhaps: training goes on without one
            self._process = spawn(self._command, self._environment, self._output, self._boot, given=subprocess.PIPE)
            self._orphan_reaper.add(self._process.pid)

    def take(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, boot: Path
    ) -> subprocess.Popen[bytes]:
        """A process with this environment, as `spawn` starts one: the one that waits, or another where it is gone."""
        process, self._process = self._process, None
        self._delay()
        if process is not None and process.stdin is not None and process.poll() is None:
            missing = {name: text for name, text in environment.items() if self._environment.get(name) != text}
            with contextlib.suppress(OSError):
                self._output.replace(output)
                self._boot.replace(boot)
                process.stdin.write(json.dumps(missing).encode() + b"\n")
                process.stdin.close()
                return process
        if process is not None:
            self._end(process)
        return spawn(command, environment, output, boot)

    def close(self) -> None:
        """Kill the standby, which holds no state."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        signal_group(process.pid, signal.SIGKILL)
        process.communicate()
        self._orphan_reaper.remove(process.pid)

    def _delay(self) -> None:
        self._due = time.monotonic() + STANDBY_DELAY_SECONDS
