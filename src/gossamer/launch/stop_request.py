"""Stop request: hears the signals by which somebody asks the launcher to end its run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from gossamer.base.run_files import RunFiles
from gossamer.launch.process import ManagedProcess, end_all

# A wrapper that hands Ctrl-C on, such as `uv run`, gives the launcher two for one
DOUBLED_SECONDS = 0.5


class StopRequest:
    """Handler of signals that keeps the first: workers get its like, and time to save. Another one asks to end at once.

    Signals are kept and looked at between other things, so that none interrupts a start or an end.
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
        """Whether whoever asked does not want to wait."""
        return self._second

    @property
    def worker_signal(self) -> signal.Signals:
        """Ctrl-C is KeyboardInterrupt in the script, too; all else is SIGTERM."""
        return signal.SIGINT if self.number == signal.SIGINT else signal.SIGTERM

    def waiting(self, grace_seconds: float) -> str:
        """The sentence for who waits for the workers."""
        again = "press Ctrl-C again" if self.number == signal.SIGINT else "send the signal again"
        return f"waiting up to {grace_seconds:g} s for the workers to save; {again} to end them now"


def end_by_request(
    workers: Sequence[ManagedProcess],
    stop: StopRequest,
    files: RunFiles,
    grace_seconds: float,
    note: Callable[[str], None],
) -> dict[int, int]:
    """Hand the request on to the workers and give them time to save; exit codes by rank."""
    files.stopping.touch()
    if stop.worker_signal is signal.SIGINT:
        files.interrupted.touch()
    if any(worker.lives and worker.entered for worker in workers):
        note(stop.waiting(grace_seconds))
    exit_codes = end_all(workers, grace_seconds, stop.worker_signal, stop.hurried)
    if killed := [f"rank {rank}" for rank, exit_code in exit_codes.items() if exit_code == -signal.SIGKILL]:
        note(f"killed, since they had not ended by then: {', '.join(killed)}")
    return exit_codes
