"""Stack dumps: each worker writes the Python stacks of all its threads on SIGUSR1, from its launcher or any process.

faulthandler writes the file, even if the worker is stuck in native code. The worker's log receives the same text when
its main thread runs Python again. The launcher requests dumps by itself when a worker reports a stall.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from gossamer.base import system
from gossamer.base.run_files import RunFiles
from gossamer.events import Attached, Event, Stalled, StepEnded

SIGNAL = next(iter(system.signals("SIGUSR1")), None)  # None on Windows, where no worker writes its stacks
# Workers that wait for the same silent worker report the stall within a few seconds of each other
SAME_SILENCE_SECONDS = 30.0
HEAD, END = "stacks of rank {rank}, asked for by SIGUSR1:", "end of the stacks of rank {rank}"  # lines of its log
DUMP_NOTE = "wrote the Python stacks of its workers: see `gossamer stacks {logs}`"
HELD: list[system.File] = []  # open until the process ends: faulthandler knows their numbers


class DumpOnSignal:
    """A worker's handler of SIGUSR1, and a listener that marks this worker's stalls for the launcher.

    A lock on the file means that the worker handles the signal. If the script installs its own handler for the signal,
    the file and the lock are removed.
    """

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._files, self._rank = files, rank
        self._path = files.stacks(rank)
        self._file: int | None = None
        if SIGNAL is not None:
            file = system.open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
            HELD.append(file)
            self._file = file.fileno()
            signal.signal(SIGNAL, self._show)
            system.dump_stacks_on(SIGNAL, self._file)
            system.lock_file(self._file)  # last: from now on the signal does not end the process

    def __call__(self, event: Event) -> None:
        match event:
            case Attached() | StepEnded() if self._file is not None and not self._is_handler():
                self._give_up()
            case Stalled():
                with contextlib.suppress(OSError):  # a full disk must not end training
                    self._files.stalled(self._rank).touch()

    def close(self) -> None:
        """End of the script. A late signal is ignored and does not end the process."""
        if SIGNAL is not None and self._is_handler():
            system.dump_no_stacks_on(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_IGN)
        self._give_up()

    def _is_handler(self) -> bool:
        return self._file is not None and SIGNAL is not None and signal.getsignal(SIGNAL) == self._show

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            if not os.fstat(file).st_size:
                self._path.unlink(missing_ok=True)
            system.unlock_file(file)  # faulthandler may hold the file itself

    def _show(self, number: int, frame: FrameType | None) -> None:
        head, end = (f"{line.format(rank=self._rank)}\n".encode() for line in (HEAD, END))
        with contextlib.suppress(OSError):  # not sys.stderr: the main thread may be writing to it
            os.write(2, head + self._path.read_bytes() + end)


class StackRequests:
    """The launcher's side: requests dumps and shows notes. note: shows a message to the user."""

    def __init__(
        self,
        files: RunFiles,
        logs: Path,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._logs, self._note, self._clock = files, logs, note, clock
        self._stalls: set[tuple[Path, int]] = set()  # with the time of each stall
        self._asked = -float("inf")

    def ask(self) -> Sequence[int]:
        """Request a dump from all workers. Return the process ids of those that received the request."""
        self._asked = self._clock()
        asked = ask(self._files.all_stacks())
        if asked:
            self._note(DUMP_NOTE.format(logs=self._logs))
        return asked

    def tick(self) -> None:
        """Request dumps if a worker has reported a stall since the last call."""
        stalls = {(path, path.stat().st_mtime_ns) for path in self._files.all_stalled()}
        new = bool(stalls - self._stalls) and self._clock() - self._asked >= SAME_SILENCE_SECONDS
        self._stalls = stalls
        if new:
            self.ask()

    def keep(self) -> None:
        """At the end of the run: copy the dumps to the folder of logs, as far as the disk has room."""
        for path in [*self._files.all_stacks(), *self._files.all_flights()]:
            if path.stat().st_size:
                with contextlib.suppress(OSError):  # the record of the run and its table follow
                    shutil.copyfile(path, self._logs / path.name)


def ask(dumps: Iterable[Path]) -> Sequence[int]:
    """Request a new dump for each of these files, in place of the last one. Return the process ids that were signaled:
    workers that are running and handle the signal."""
    asked: list[int] = []
    if SIGNAL is None:
        return asked
    for path in dumps:
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:  # the worker may end meanwhile
            try:
                system.lock_file(file.fileno())
            except BlockingIOError:  # its worker holds the lock
                file.truncate()
                pid = int(path.stem.rpartition("-")[2])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGNAL)
                    asked.append(pid)
    return asked
