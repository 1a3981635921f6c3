"""Signal forwarding: SIGUSR1 and SIGUSR2 to the launcher reach the workers that handle them (Linux).

Schedulers such as Slurm announce the end of a job to the launcher by such a signal, and scripts and trainers handle it
in order to save. Their default action ends a process, so a worker without a handler never receives one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType

from gossamer.base import system
from gossamer.base.run_files import RunFiles
from gossamer.base.units import ranks_text
from gossamer.launcher import stack_dumps
from gossamer.launcher.stack_dumps import StackRequests

FORWARDED = system.signals("SIGUSR1", "SIGUSR2")
SENT = "{signal} was forwarded to {ranks}"
UNHANDLED = "{signal} was ignored: no worker handles it"


class SignalForwarder:
    """The launcher's handler of FORWARDED. SIGUSR1 also asks for stack dumps, from workers that keep that handler.

    Args:
        files: of the run.
        stacks: receives SIGUSR1, too.
        note: shows a sentence to the user.
    """

    def __init__(self, files: RunFiles, stacks: StackRequests, note: Callable[[str], None]) -> None:
        self._files, self._stacks, self._note = files, stacks, note
        self._received: list[signal.Signals] = []

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        """Keep the signal for the next `tick`."""
        self._received.append(signal.Signals(number))

    def tick(self) -> None:
        """Forward the signals since the last call; call it regularly."""
        while self._received:
            number = self._received.pop(0)
            dumped = self._stacks.ask() if number == stack_dumps.SIGNAL else ()
            ranks = forward(number, self._files, but=dumped)
            if ranks:
                self._note(SENT.format(signal=number.name, ranks=ranks_text(ranks)))
            elif not dumped:
                self._note(UNHANDLED.format(signal=number.name))
        self._stacks.tick()


def forward(number: signal.Signals, files: RunFiles, *, but: Collection[int] = ()) -> list[int]:
    """Send a signal to each living worker that has a handler for it.

    Args:
        number: the signal.
        files: of the run, whose processes are this one's children.
        but: process ids to leave out.

    Returns:
        The ranks of the workers that it was sent to, in order.
    """
    ranks = []
    for rank, pid in sorted(files.living()):
        if pid not in but and _handles(pid, number):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                ranks.append(rank)
    return ranks


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether this is a child of this process that has a handler for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended, or this is not Linux
        return False
    status = dict(line.split(":", 1) for line in lines)
    return int(status["PPid"]) == os.getpid() and bool(int(status["SigCgt"], 16) >> (number - 1) & 1)
