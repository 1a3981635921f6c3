"""Communicator: operations of a GPU engine (NCCL) in flight, which are completed on the device or aborted.

Its kernels wait for a dead peer as long as their communicator exists. After an abort they end as if they had succeeded,
with arbitrary results. The host therefore waits until work is complete on the device, checks meanwhile whether all
peers are alive, and returns no result of an aborted communicator. None of this has run on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed import DistError

from gossamer.base.units import first_line
from gossamer.comm.device_wait import DeviceWait
from gossamer.comm.environment.wait_timeout import VARIABLE, duration
from gossamer.errors import PeerLost

ABORTED = "the communicator between devices was aborted"
AT_ONCE = timedelta(seconds=1)  # with a timeout, wait() also raises errors of work that is already complete

_Begun = TypeVar("_Begun")


class EngineWork(Protocol):
    """The interface of torch's Work."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta) -> object: ...


class Communicator:
    """One incarnation of a group's communicator, from its creation to its abort.

    Args:
        abort: Aborts torch's communicator.
        watch: Watches the peers.
        seconds: Time limit for work while all peers are alive.
    """

    def __init__(self, abort: Callable[[], object], watch: DeviceWait, seconds: float) -> None:
        self._abort, self._watch, self._seconds = abort, watch, seconds
        self._aborted, self._ended, self._ending_it = False, False, threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def watched_by(self, watch: DeviceWait) -> None:
        """Replace the watch."""
        self._watch = watch

    def begin(self, start: Callable[[], _Begun]) -> _Begun:
        """Begin work, and return the result of `start`. Raises PeerLost."""
        with self._ending():
            self._refuse_aborted()
            return start()

    def finish(self, works: Sequence[EngineWork]) -> None:
        """Wait until all work is complete on the device. Raises PeerLost on a loss or a timeout."""
        with self._ending():
            if not self._watch.until(lambda: all(work.is_completed() for work in works), self._seconds):
                self._watch.break_off(
                    f"work between devices was not complete within {duration(self._seconds)}, although all ranks are "
                    f"connected: one is frozen, or busy for too long. To wait twice as long, set "
                    f"{VARIABLE}={2 * self._seconds:g} on all ranks"
                )
            self._refuse_aborted()  # after completion, because `_aborted` is set before the abort completes work
            for work in works:
                work.wait(AT_ONCE)

    def abort(self) -> None:
        """Abort work on devices. Thread-safe and idempotent; blocks until the abort is complete."""
        self._aborted = True
        with self._ending_it:
            if not self._ended:
                self._ended = True
                self._abort()

    def _refuse_aborted(self) -> None:
        if self._aborted:
            self._watch.break_off(ABORTED)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            self.abort()
            raise
        except DistError as failure:
            self.abort()
            self._watch.blame(first_line(failure))
