"""Communicator: what an engine between devices (NCCL) has under way, finished on the device or aborted.

Its kernels wait for a dead peer as long as their communicator is there. Once it is aborted they end as if all were
well, with anything in their memory. So this machine waits until work is done on the device, looks meanwhile whether all
peers are there, and hands out nothing of a communicator that was aborted. None of it has run on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed import DistError

from gossamer.comm.environment.wait_timeout import VARIABLE, duration
from gossamer.comm.peer_watch import PeerWatch, first_line
from gossamer.errors import PeerLost

ABORTED = "the communicator between devices was aborted"
AT_ONCE = timedelta(seconds=1)  # which wait() does not need; told a time, it raises what went wrong with what is done

_Begun = TypeVar("_Begun")


class EngineWork(Protocol):
    """What torch's engines call Work."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta) -> object: ...


class Communicator:
    """One incarnation of a group's communicator, from when it stands until it is aborted.

    abort: torch's call for it; seconds: how long work may take while all peers are there.
    """

    def __init__(self, abort: Callable[[], object], watch: PeerWatch, seconds: float) -> None:
        self._abort, self._watch, self._seconds = abort, watch, seconds
        self._aborted, self._ended, self._ending_it = False, False, threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def watched_by(self, watch: PeerWatch) -> None:
        """From now on hear of the peers by this one."""
        self._watch = watch

    def begin(self, start: Callable[[], _Begun]) -> _Begun:
        """What `start` comes to. Raises PeerLost."""
        with self._ending():
            self._refuse_aborted()
            return start()

    def finish(self, works: Sequence[EngineWork]) -> None:
        """Return when all of them are done on the device. Raises PeerLost where that never happens."""
        with self._ending():
            if not self._watch.until(lambda: all(work.is_completed() for work in works), self._seconds):
                self._watch.break_off(
                    f"work between devices was not done within {duration(self._seconds)}, though all ranks are "
                    f"connected: one is frozen, or busy for too long. {VARIABLE}={2 * self._seconds:g} has all wait "
                    "for twice as many seconds"
                )
            self._refuse_aborted()  # after they were done: whoever aborts says so before
            for work in works:
                work.wait(AT_ONCE)

    def abort(self) -> None:
        """Give up on what is under way on devices. Any thread may, and more than once; it is over when this returns."""
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
