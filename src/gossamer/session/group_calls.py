"""Group calls: text all-gathers and broadcasts of a session outside of steps, on its communication thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from gossamer.errors import LoopError
from gossamer.runtime.comm_thread import CommThread
from gossamer.runtime.transport import Transport


class GroupCalls:
    """The group as one session sees it. Every rank makes the same calls in the same order."""

    def __init__(self, transport: Transport, comm_thread: CommThread) -> None:
        self.transport, self.comm_thread, self.pid = transport, comm_thread, os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that attached, which has no part in the group."""
        return os.getpid() != self.pid

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.transport.world == 1:
            return [text]
        self._refuse_fork()
        return self.comm_thread.submit(partial(self.transport.all_gather_text, text)).wait()

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite `tensors` with those of rank `source`."""
        self._refuse_fork()
        self.comm_thread.submit(partial(self.transport.broadcast_, tensors, source)).wait()

    def _refuse_fork(self) -> None:
        if self.forked:
            raise LoopError("a forked process has no part in the group. Save, load and train where attach was called.")


def leave(comm_thread: CommThread, transport: Transport, process: int) -> None:
    """End the communication thread and leave the group before the interpreter ends, unless in a forked child."""
    if os.getpid() != process:
        return
    if comm_thread.is_here:  # garbage is collected anywhere, also amid what this would close
        threading.Thread(target=leave, args=(comm_thread, transport, process), daemon=True).start()
    else:
        comm_thread.close()
        with suppress(RuntimeError):
            transport.close()
