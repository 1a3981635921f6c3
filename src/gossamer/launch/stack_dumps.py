"""Stack dumps: where every worker is, in Python, written by each on SIGUSR1: asked by its launcher, or by anybody.

The file is written by faulthandler, whatever the worker is stuck in; the worker's log has the same as soon as its main
thread runs Python again. A launcher asks by itself once a silence has been told of, which is how a hang gets a name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from gossamer.base.run_files import RunFiles
from gossamer.events import Attached, Event, Stalled, StepEnded

SIGNAL = signal.SIGUSR1
# Those that wait for the same silent worker tell of it within a few seconds of each other
SAME_SILENCE_SECONDS = 30.0
TOLD = "wrote where its workers are, in Python: see `gossamer stacks {logs}`"


class DumpOnSignal:
    """A worker's answer to SIGUSR1, and a listener that asks for the others' dumps where this worker has waited long.

    A lock on the file says that the signal may be sent. A script that takes the signal for itself keeps it: then the
    file goes, and so does the lock.
    """

    def __init__(self, files: RunFiles, rank: int) -> None:
        self._files, self._rank = files, rank
        self._path = files.stacks(rank)
        self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o666)
        signal.signal(SIGNAL, self._show)
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=True)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # last: from now on the signal ends nobody

    def __call__(self, event: Event) -> None:
        match event:
            case Attached() | StepEnded() if self._file is not None and signal.getsignal(SIGNAL) != self._show:
                self._give_up()
            case Stalled():
                self._files.stalled(self._rank).touch()

    def close(self) -> None:
        """The script is over. The signal ends nobody from now on, should one be on its way."""
        if self._file is not None and signal.getsignal(SIGNAL) == self._show:
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_IGN)
        self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            if not os.fstat(file).st_size:
                self._path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # faulthandler may hold the file itself

    def _show(self, number: int, frame: FrameType | None) -> None:
        head = f"stacks of rank {self._rank}, asked for by {SIGNAL.name}:\n"
        with contextlib.suppress(OSError):  # not by sys.stderr, which the main thread may be in
            os.write(2, head.encode() + self._path.read_bytes())


class StackRequests:
    """The launcher's side. note: tells the user."""

    def __init__(
        self,
        files: RunFiles,
        logs: Path,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._logs, self._note, self._clock = files, logs, note, clock
        self._stalls: set[tuple[Path, int]] = set()  # with the moment that each was told
        self._asked = -float("inf")

    def ask(self) -> Sequence[int]:
        """Ask all workers for a dump now; the process ids of those that were asked."""
        self._asked = self._clock()
        asked = ask(self._files.all_stacks())
        if asked:
            self._note(TOLD.format(logs=self._logs))
        return asked

    def tick(self) -> None:
        """Ask where a worker has told of a silence since the last call."""
        stalls = {(path, path.stat().st_mtime_ns) for path in self._files.all_stalled()}
        new = bool(stalls - self._stalls) and self._clock() - self._asked >= SAME_SILENCE_SECONDS
        self._stalls = stalls
        if new:
            self.ask()

    def keep(self) -> None:
        """At the end: what was dumped stays beside the logs."""
        for path in [*self._files.all_stacks(), *self._files.all_flights()]:
            if path.stat().st_size:
                shutil.copyfile(path, self._logs / path.name)


def ask(dumps: Iterable[Path]) -> Sequence[int]:
    """Ask the workers of these files for a dump, in place of the one before; those that live and take the signal."""
    asked = []
    for path in dumps:
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:  # it may end meanwhile
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its worker has it
                file.truncate()
                pid = int(path.stem.rpartition("-")[2])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGNAL)
                    asked.append(pid)
    return asked
