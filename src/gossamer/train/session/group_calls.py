"""Group calls: operations of a session's group outside of steps, on its communication thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from gossamer import events
from gossamer.base import flight_recorder
from gossamer.base.ops import Script
from gossamer.base.runner import broadcast, run_script
from gossamer.base.transport import Transport
from gossamer.comm.detached import DetachedTransport
from gossamer.comm.environment.roll_call import RollCall
from gossamer.comm.environment.wait_progress import named_ranks
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import CheckpointError, LoopError

T = TypeVar("T")
_open: list[weakref.ref[GroupCalls]] = []  # of the sessions of this process, in the order of attach


class GroupCalls:
    """The group as used by one session. Every rank makes the same calls in the same order."""

    def __init__(self, transport: Transport, comm_thread: CommThread) -> None:
        self.transport, self.comm_thread, self.pid = transport, comm_thread, os.getpid()
        self.worker = current_worker()
        self._missing: list[int] = []  # at the last call of lacks_ranks
        self.roll_call: Callable[[], RollCall | None] = lambda: None

    def publish(self, roll_call: Callable[[], RollCall | None]) -> None:
        """Publish the group of an open session: calls without a session use it as well; or `roll_call` if there is one,
        since the recipe tolerates the loss of a rank."""
        self.roll_call = roll_call
        _open.append(weakref.ref(self))

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that attached, which is not a member of the group."""
        return os.getpid() != self.pid

    def run(self, script: Callable[[], Script]) -> Any:
        """The result of one worker's script. If another rank makes a step instead, both raise an error, since their
        operations do not match."""
        return self.together(lambda: run_script(script(), self.transport)).result

    @property
    def is_detached(self) -> bool:
        """Whether this worker was lost and returned alone, while the group continued without it."""
        return isinstance(self.transport, DetachedTransport)

    def has_all(self, size: int) -> bool:
        """Whether the group has all `size` workers of the job; under attach(mesh=...) it is a part of them."""
        return not self.comm_thread.is_fixed or self.transport.world == size

    def lacks_ranks(self, caller: str) -> bool:
        """Whether some rank is lost, or has returned alone, so that calls for all ranks are impossible: the same on all
        remaining ranks, which all call it. False for recipes that do not tolerate losses."""
        calls = self.roll_call()
        if calls is None or self.alone:
            return False
        here = calls.gather(caller, "", b"detached" if self.is_detached else b"")
        there = [rank for rank, participates in here.items() if not participates]
        missing = [rank for rank in range(self.transport.world) if rank not in there]
        if missing and missing != self._missing and self.transport.rank == min(here):
            events.notice(
                f"{caller} saves nothing from now on: a checkpoint needs the parts of all ranks. Lost, or restarted: "
                f"{named_ranks(missing)}. Training continues"
            )
        self._missing = missing
        return bool(missing)

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.alone:
            return [text]
        return self.together(partial(self._all_gather_text, text))

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite `tensors` with those of rank `source`."""
        self.together(partial(broadcast, self.transport, tensors, source))

    def _all_gather_text(self, text: str) -> list[str]:
        with flight_recorder.current.call(self.transport, "all-gather of texts"):
            return self.transport.all_gather_text(text)

    def together(self, calls: Callable[[], T]) -> T:
        """The result of several calls; they are repeated from the first one if ranks change in between."""
        self._refuse_fork()
        if self.comm_thread.is_here:
            return calls()
        return self.comm_thread.exchange(calls).wait()

    def whole(self, calls: Callable[[], T]) -> T:
        """As `together` in an elastic run; in a fixed group, on this thread. A CheckpointError is raised on this thread
        in both cases, since the communication thread continues."""

        def attempt() -> tuple[T | None, CheckpointError | None]:
            try:
                return calls(), None
            except CheckpointError as failure:
                return None, failure

        if self.comm_thread.is_fixed:
            return calls()
        result, failed = self.together(attempt)
        if failed is not None:
            raise failed
        return cast(T, result)

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and none can join."""
        return self.comm_thread.is_alone(self.transport.world)

    def _refuse_fork(self) -> None:
        if self.forked:
            raise LoopError(
                "a forked process is not a member of the group. Save, load and train in the process that called attach."
            )


def newest_group() -> GroupCalls | None:
    """The group of this worker's newest open session, the same on every rank; None without a session."""
    alive = [group for each in tuple(_open) if (group := each()) is not None and not group.forked]
    own = [group for group in alive if group.worker is current_worker()]
    return own[-1] if own else None


def leave(comm_thread: CommThread, transports: Sequence[Transport], process: int) -> None:
    """End the communication thread and leave its groups before the interpreter ends, unless in a forked child."""
    if os.getpid() != process:
        return
    _open[:] = [each for each in _open if (group := each()) is not None and group.comm_thread is not comm_thread]
    if comm_thread.is_here:  # garbage is collected on any thread, also during an operation of this one
        threading.Thread(target=leave, args=(comm_thread, transports, process), daemon=True).start()
    else:
        comm_thread.close()
        for transport in transports:
            with suppress(RuntimeError):
                transport.close()
