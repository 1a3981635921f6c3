"""Worker: runs the user's script as `python script.py` would, and reports its failure to the launcher.

The launcher starts it as `python -u -m gossamer.launcher.worker SCRIPT ARGS...`, or with `-m MODULE` for SCRIPT. With
--standby before SCRIPT, it imports what a session needs, and then waits for the place of a lost worker.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from gossamer.base import system
from gossamer.base.run_files import RUN_DIRECTORY, RunFiles, Stage, current_attempt, write_json
from gossamer.comm.environment.emulated_host import enter_host
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.runtime import interruption
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.comm.runtime.uncaught_errors import is_users, shortened, summary_of
from gossamer.launcher.failure import Origin, is_echo
from gossamer.launcher.job import STANDBY
from gossamer.launcher.process_logs import PatientFile

Finish = Callable[[bool], None]  # called with whether the script failed


def main(arguments: Sequence[str] | None = None, finish: Finish = lambda failed: None) -> None:
    """Run the script. `finish(failed)` writes this rank's record after success and failure."""
    if not wait_for_place():
        return
    enter_host()
    program = arguments or sys.argv[1:]
    files = RunFiles(Path(os.environ[RUN_DIRECTORY]))
    reporter = FailureReporter(files, int(os.environ["RANK"]))
    os.dup2(1, 2)  # one file for both streams keeps their order
    _print_patiently()
    reporter.started()
    _end_with_launcher(int(os.environ["GOSSAMER_LAUNCHER_PID"]))
    patience_seconds = float(os.environ.get("GOSSAMER_GRACE_SECONDS", "30")) / 3  # the rest of the time is for saving
    interruption.current.install(patience_seconds, files.interrupted.exists)
    try:
        reporter.entered()  # from now on Ctrl-C interrupts the script
        exit_code = _run(program, reporter)
    except BaseException as error:
        exit_code = reporter.raised(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rest is short
    finish(bool(exit_code))
    if exit_code:
        raise SystemExit(exit_code)
    reporter.finished()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_place() -> bool:
    """Wait for a lost worker's place, if the first argument is --standby, which is removed.

    Returns False if the launcher has ended without a place for this process.
    """
    if sys.argv[1:2] != [STANDBY]:
        return True
    from gossamer.train.parameter_server.standby import wait_for_role  # imported late: other workers do not need it

    sys.argv.pop(1)
    warm_up()
    return wait_for_role()


def warm_up() -> None:
    """Import what a session needs, and what torch imports for the first optimizer.

    It makes no step, which would look for a GPU: forks of a process that has done so cannot use one.
    """
    import torch._dynamo  # noqa: F401

    import gossamer.train.session.attach

    if is_elastic():
        import gossamer.comm.elastic.joined_run  # noqa: F401


def _print_patiently() -> None:
    """Print through PatientFile: a full disk must not end training."""
    raw: Any = PatientFile(io.FileIO(1, "w", closefd=False), "<stdout>")
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        encoding, errors = before.encoding, before.errors
        setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True))


class FailureReporter:
    """Writes one worker's start, end and failure reports for its launcher."""

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._rank = rank
        self._attempt = current_attempt()
        self._files = files

    def started(self) -> None:
        self._files.report_start(self._rank, self._attempt, os.getpid())

    def entered(self) -> None:
        self._files.mark(Stage.ENTERED, self._rank, self._attempt)

    def finished(self) -> None:
        with suppress(OSError):  # a full disk at the very end is not a failure of the run
            write_json(self._files.finished(self._rank, self._attempt), {"moment": time.time()})

    def ended(self, code: object) -> int:
        """Exit code of sys.exit(code). Anything but a number is printed and means 1, as without a launcher. The system
        keeps the lowest eight bits of a number, so -1 means 255: a negative code would be that of a signal."""
        if code is None:
            return 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        exit_code = code & 0xFF if isinstance(code, int) else 1
        if not exit_code:
            return 0
        self._failed(exit_code, Origin.ENDED, "the script called sys.exit", "")
        return exit_code

    def raised(self, error: BaseException) -> int:
        lines = traceback.format_exception(type(error), error, shortened(error, _from_script(error)))
        self._failed(1, Origin.ECHO if is_echo(error) else Origin.RAISED, summary_of(error), "".join(lines))
        return 1

    def _failed(self, exit_code: int, origin: Origin, summary: str, text: str) -> None:
        report: dict[str, Any] = {
            "rank": self._rank,
            "exit_code": exit_code,
            "moment": time.time(),
            "origin": origin.name,
            "summary": summary,
            "traceback": text,
        }
        try:
            write_json(self._files.failure(self._rank, self._attempt), report)
        except OSError as problem:  # a full disk: the launcher only receives the exit code
            print(f"{text}gossamer: the launcher received no report of this error ({problem})", file=sys.stderr)


def _run(program: Sequence[str], reporter: FailureReporter) -> int:
    """Run the script. Sessions are closed while its variables exist, since nothing else references a session."""
    try:
        variables = _run_program(program)
        _close_sessions()
        del variables
    except SystemExit as end:
        exit_code = reporter.ended(end.code)
        if exit_code:
            return exit_code
        _close_sessions()
    return 0


def _run_program(program: Sequence[str]) -> Mapping[str, object]:
    """Run the script or module. Return its global variables at its end."""
    if program[0] == "-m":
        sys.argv = list(program[1:])
        return runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    sys.argv = list(program)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    return runpy.run_path(program[0], run_name="__main__")


def _close_sessions() -> None:
    """Close the sessions that the script left open."""
    for session in open_sessions():
        session.close()


def _from_script(error: BaseException) -> TracebackType | None:
    """The user's part of a traceback: from the first frame of the script on."""
    at = error.__traceback__
    while at is not None and not is_users(at):
        at = at.tb_next
    unread = isinstance(error, SyntaxError)  # a script with a syntax error has no frame; ours would not help
    return at if at is not None or unread else error.__traceback__


def _end_with_launcher(launcher: int) -> None:
    """End this worker and its helpers when the launcher has ended for any reason."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        system.kill_own_group()

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
