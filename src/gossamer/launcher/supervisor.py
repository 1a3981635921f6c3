"""Supervisor: runs one launcher's processes by a restart policy, and ends them on a failure, a signal or an error.

Fixed runs, runs with servers and elastic runs are configurations of it: fixed_run, served_run, elastic_run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from gossamer.base import system
from gossamer.base.run_files import RunFiles
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.launcher.failure import LOOK_SECONDS, Outcome
from gossamer.launcher.job import Spawn, spawn
from gossamer.launcher.parent_watchdog import OrphanReaper
from gossamer.launcher.process import POLL_SECONDS, ManagedProcess, StandbyProcess, end_all
from gossamer.launcher.restart_policy import RestartPolicy

# A wrapper that forwards Ctrl-C, such as `uv run`, doubles the signal
DOUBLED_SECONDS = 0.5

P = TypeVar("P", bound=ManagedProcess)


class LauncherStopped(KeyboardInterrupt):
    """Raised if the launcher is stopped while it waits for other machines. Not an Exception: torch would catch it."""


class Supervisor:
    """Runs the processes that a policy starts, until the policy or a signal ends the run. Call it in the main thread.

    Args:
        files: of the run, in its private directory.
        grace_seconds: time for workers to save after a request to stop.
        note: shows a message to the user.
        tick: called some twenty times a second in a thread, after the output of all processes was read.
    """

    def __init__(
        self, files: RunFiles, grace_seconds: float, note: Callable[[str], None], tick: Callable[[], None]
    ) -> None:
        self.files, self.note = files, note
        self.orphan_reaper = OrphanReaper(files.directory)
        self.stop = StopRequest()
        self.workers: list[ManagedProcess] = []
        self._servers: list[ManagedProcess] = []
        self.at_end = ExitStack()  # closed after all workers and servers have ended
        self._grace_seconds, self._tick = grace_seconds, tick
        self._ends_whole_run, self._is_waiting = True, False

    def add(self, worker: P) -> P:
        """Supervise a worker: read its output, ask it to save on a signal, and stop it at the end of the run."""
        self.workers.append(worker)
        return worker

    def add_server(self, server: P) -> P:
        """Supervise a server: read its output, and stop it after all workers, which may need it to save."""
        self._servers.append(server)
        return server

    def standby(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], begin: Spawn = spawn
    ) -> StandbyProcess:
        """Return a standby that is closed at the end of the run. Without a command, it starts no process.

        Args:
            name: of its files.
            command: the command.
            environment: variables known at its start.
            begin: starts another process where there is no standby.
        """
        output, boot = (self.files.directory / f"{name}{part}.txt" for part in ("", "-boot"))
        standby = StandbyProcess(command, environment, output, boot, self.orphan_reaper, begin)
        self.at_end.callback(standby.close)
        return standby

    def end_workers(self, grace_seconds: float | None = None) -> Mapping[int, int]:
        """Stop running workers. Return exit codes by number."""
        return end_all(self.workers, grace_seconds, hurried=self.stop.hurried)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager: a request to stop interrupts the block, which waits for other machines."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def run(self, policy: RestartPolicy) -> Outcome:
        self._ends_whole_run = policy.ends_whole_run
        with handling(self._on_signal, *STOP_SIGNALS), self.orphan_reaper:
            try:
                with PeriodicTask(LOOK_SECONDS, self._look):
                    return self._supervise(policy)
            finally:
                for process in self._processes:
                    process.log.close()

    def _supervise(self, policy: RestartPolicy) -> Outcome:
        try:
            policy.begin()
            while not self.stop and policy.look(time.monotonic()):
                time.sleep(POLL_SECONDS)
            self._ask_to_save(policy)
        except LauncherStopped:
            pass
        finally:
            stopped = self.end_workers()
            end_all(self._servers, hurried=self.stop.hurried)
            self.at_end.close()
        if self.stop and not policy.failed:
            return Outcome(signal=self.stop.number, restarts=policy.restarts)
        return policy.outcome(stopped)

    def _ask_to_save(self, policy: RestartPolicy) -> None:
        """Give workers time to save before the run ends, or to leave a run that continues on other machines."""
        if self.stop and policy.ends_whole_run:
            end_by_request(self.workers, self.stop, self.files, self._grace_seconds, self.note)
        elif self.stop:
            self.note(f"leaving the run, which continues; workers here have up to {self._grace_seconds:g} s to leave")
            self.end_workers(self._grace_seconds)
        elif policy.may_save:
            _announce(self.files.stopping)
            self.end_workers(self._grace_seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Create the file at once: a sender that signals all processes of a job also signals the workers, which look
        for the file."""
        if self._ends_whole_run:
            _announce(self.files.stopping)
        self.stop(number, frame)
        if self._is_waiting:
            raise LauncherStopped

    def _look(self) -> None:
        for process in self._processes:
            process.log.look()
        self._tick()

    @property
    def _processes(self) -> tuple[ManagedProcess, ...]:
        return (*self.workers, *self._servers)


class StopRequest:
    """Signal handler that keeps the first signal: workers receive a similar one and time to save. A second one, at
    least DOUBLED_SECONDS later, ends them at once.

    Signals are only kept; the supervisor reads them between other work, so they do not interrupt a start or an end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = 0.0
        self._second = False
        self.number: int | None = None  # of the first signal

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if self.number is None:
            self.number, self._first = number, self._clock()
        elif self._clock() >= self._first + DOUBLED_SECONDS:
            self._second = True

    def __bool__(self) -> bool:
        return self.number is not None

    def hurried(self) -> bool:
        """Whether a second signal asked to end at once."""
        return self._second

    @property
    def worker_signal(self) -> signal.Signals:
        """SIGINT after Ctrl-C, which raises KeyboardInterrupt in the script; otherwise SIGTERM."""
        return signal.SIGINT if self.number == signal.SIGINT else signal.SIGTERM

    def waiting(self, grace_seconds: float) -> str:
        """The message while the launcher waits for the workers."""
        again = "press Ctrl-C again" if self.number == signal.SIGINT else "send the signal again"
        return f"waiting up to {grace_seconds:g} s for the workers to save; {again} to end them now"


def end_by_request(
    workers: Sequence[ManagedProcess],
    stop: StopRequest,
    files: RunFiles,
    grace_seconds: float,
    note: Callable[[str], None],
) -> dict[int, int]:
    """Forward the request to the workers and give them time to save. Return exit codes by rank."""
    _announce(files.stopping)
    if stop.worker_signal is signal.SIGINT:
        _announce(files.interrupted)
    if any(worker.lives and worker.entered for worker in workers):
        note(stop.waiting(grace_seconds))
    exit_codes = end_all(workers, grace_seconds, stop.worker_signal, stop.hurried)
    if killed := [f"rank {rank}" for rank, exit_code in exit_codes.items() if exit_code == -system.KILL]:
        note(f"killed, because they had not ended by then: {', '.join(killed)}")
    return exit_codes


def _announce(file: Path) -> None:
    """Create a file that workers look for. They receive the signal also if the disk is full or the folder was removed;
    an error here, or in a handler, would take their time to save."""
    with suppress(OSError):
        file.touch()


class PeriodicTask:
    """Calls `action` every `seconds` in a thread until the block ends, then once more.

    An error of `action` interrupts the main thread and is raised at the end of the block.
    """

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds = seconds
        self._action = action
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeriodicTask:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._action()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._action()
        except BaseException as error:
            self._error = error
            if (number := handled_stop_signal()) is not None:
                system.interrupt_main_thread(number)


def handled_stop_signal() -> signal.Signals | None:
    """A stop signal that this process handles, to interrupt the main thread: SIGINT, unless it is ignored."""
    return next((number for number in STOP_SIGNALS if callable(signal.getsignal(number))), None)
