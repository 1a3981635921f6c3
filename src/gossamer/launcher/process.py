"""Managed process: one worker or server of a run over all its restarts; and the preparation of its replacement."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gossamer.base import system
from gossamer.base.run_files import RunFiles, Stage, read_json, write_json
from gossamer.launcher.failure import Failure, from_exit, from_report
from gossamer.launcher.job import Spawn, WarmSpawn, spawn
from gossamer.launcher.parent_watchdog import OrphanReaper
from gossamer.launcher.process_logs import ProcessLog
from gossamer.launcher.restart_policy import RestartBudget

POLL_SECONDS = 0.02
# For the remaining workers after a failure: in lock step nothing is saved, but SIGTERM handlers get their time
FAILURE_GRACE_SECONDS = 5.0

# After the last worker has attached: until its first steps, the others need the CPU more than a standby
STANDBY_DELAY_SECONDS = 2.0
# A worker that has not attached by then waits for others or for a place in the run, or has no session
START_SECONDS = 60.0


class ManagedProcess:
    """A worker or server with at most one running process. The process leads a process group: its helpers end with it.

    Args:
        number: its number in the run's files.
        files: the run's files.
        orphan_reaper: kills the processes if this launcher dies.
        command: its command.
        environment: called with the attempt; returns the whole environment.
        log: of its output over all attempts.
        most_restarts: budget for a policy that restarts it alone.
        begin: starts a process.
    """

    def __init__(
        self,
        number: int,
        files: RunFiles,
        orphan_reaper: OrphanReaper,
        command: Sequence[str],
        environment: Callable[[int], Mapping[str, str]],
        log: ProcessLog,
        most_restarts: int = 0,
        begin: Spawn = spawn,
    ) -> None:
        self.number = number
        self.attempt = -1
        self.log = log
        self.budget = RestartBudget(most_restarts)
        self.due: float | None = None  # time of the next start
        self._files = files
        self._orphan_reaper = orphan_reaper
        self._command = command
        self._environment = environment
        self._begin = begin
        self._process: system.Process | None = None
        self._began, self._stopped = 0.0, False  # whether it was asked to end

    @property
    def lives(self) -> bool:
        """Whether it was started and its end has not been observed."""
        return self._process is not None

    @property
    def entered(self) -> bool:
        """Whether it has imported everything and is running the script."""
        return self._files.has_reached(Stage.ENTERED, self.number)

    @property
    def trains(self) -> bool:
        """Whether it has attached a session, or trains without one."""
        return any(self._files.has_reached(stage, self.number) for stage in (Stage.ATTACHED, Stage.OTHERWISE))

    @property
    def age_seconds(self) -> float:
        """Seconds since the latest start."""
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
        """Return the exit code once, negative for a signal; None while the process is running or not started."""
        if self._process is None or (exit_code := self._process.poll()) is None:
            return None
        self._end_group()  # its helpers
        self._orphan_reaper.remove(self._process.pid)
        self._process = None
        self._report_exit(exit_code)
        return exit_code

    def failure(self, exit_code: int, *, stopped: bool = False) -> Failure:
        """Failure of the newest start, from its report or its exit code. It is also written to the log."""
        report = read_json(self._files.failure(self.number, self.attempt))
        found = from_report(report) if report else from_exit(self.number, exit_code, time.time(), stopped)
        self.log.note(found.traceback or str(found))
        return found

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the process alone, not its group: it needs its helpers while it saves."""
        if self._process is not None:
            self._stopped = True
            system.request_end(self._process, number)

    def kill(self) -> None:
        self._stopped = True
        self._end_group()

    def wait(self) -> int | None:
        """Wait for the end of a killed process; returns as `ended`."""
        if self._process is not None:
            self._process.wait()
        return self.ended()

    def _report_exit(self, exit_code: int) -> None:
        """Write the exit report for the run's store. The run does not depend on it."""
        how = from_exit(self.number, exit_code, time.time(), stopped=self._stopped)
        summary = str(how) if exit_code else ""
        report = {"exit_code": exit_code, "moment": how.moment, "summary": summary, "stopped": self._stopped}
        with contextlib.suppress(OSError):
            write_json(self._files.exited(self.number, self.attempt), report)

    def _end_group(self) -> None:
        if self._process is not None:
            system.kill_group(self._process.pid)


def end_all(
    processes: Sequence[ManagedProcess],
    grace_seconds: float | None = None,
    number: signal.Signals = signal.SIGTERM,
    hurried: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Ask all processes to end by a signal. Kill the rest after `grace_seconds` or as soon as `hurried()`.

    SIGINT is sent only to processes that run the script; one that still imports would print a traceback.

    Args:
        processes: to be ended.
        grace_seconds: time to end; None for FAILURE_GRACE_SECONDS.
        number: the signal.
        hurried: whether to kill at once.

    Returns:
        Exit codes by number.
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
        exit_codes[process.number] = -system.KILL if exit_code is None else exit_code
    return exit_codes


class StandbyProcess:
    """Prepares for the next loss of a server or worker: by at most one process, or by forks that need none.

    A process that is started normally imports for two to five seconds on an idle machine, and for fifteen on a busy
    one. If `begin` is a WarmSpawn, it warms up once per run, and each replacement is a fork.

    Otherwise a standby process imports ahead, and another one after each loss. It waits on its standard input for the
    rest of its environment, as a line of JSON. While it waits it costs no CPU time and 315 MB of resident memory, of
    which 90 MB are files that the other processes share. It ends when its input is closed, and by `orphan_reaper` if
    the launcher dies.

    Args:
        command: its command; empty for no standby.
        environment: variables known at its start.
        output, boot: files for stdout and stderr until it is taken.
        orphan_reaper: kills it if this launcher dies.
        begin: starts another process if there is no standby, or if it has ended.
        clock: returns seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        boot: Path,
        orphan_reaper: OrphanReaper,
        begin: Spawn = spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin, self._clock = begin, clock
        self._forks = begin if isinstance(begin, WarmSpawn) else None
        self._command, self._environment, self._output, self._boot = command, environment, output, boot
        self._orphan_reaper = orphan_reaper
        self._process: subprocess.Popen[bytes] | None = None
        self._is_warm = False  # whether replacements are forks, of a server that has warmed up or does
        self._due = 0.0
        self._delay()

    def look(self, workers: Sequence[ManagedProcess] = (), *, ends: bool = False) -> None:
        """Prepare for the next loss, a moment after all these workers train. Call it several times a second.

        ends: whether the run ends soon, so that nothing is prepared.
        """
        if ends or self._is_prepared:
            return
        if any(worker.lives and not worker.trains and worker.age_seconds < START_SECONDS for worker in workers):
            self._delay()
            return
        if self._clock() < self._due:
            return
        self._is_warm = self._warms_up()
        if self._is_warm:
            return
        self._delay()
        with contextlib.suppress(OSError):  # for example out of memory: training continues without a standby
            self._process = spawn(self._command, self._environment, self._output, self._boot, given=subprocess.PIPE)
            self._orphan_reaper.add(self._process.pid)

    @property
    def _is_prepared(self) -> bool:
        return not self._command or self._process is not None or (self._is_warm and self._warms_up())

    def _warms_up(self) -> bool:
        return self._forks is not None and self._forks.warm_up(self._command, self._environment)

    def take(self, command: Sequence[str], environment: Mapping[str, str], output: Path, boot: Path) -> system.Process:
        """Return a process with this environment: the standby, or another one if the standby has ended."""
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
        return self._begin(command, environment, output, boot)

    def close(self) -> None:
        """Kill the standby, which holds no state."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        system.kill_group(process.pid)
        process.communicate()
        self._orphan_reaper.remove(process.pid)

    def _delay(self) -> None:
        self._due = self._clock() + STANDBY_DELAY_SECONDS
