"""Worker scope: tells which worker of this process the running code belongs to; most processes are one worker.

Where several share a process, as in a simulated job, what a worker has once (its world, its open sessions) is kept by
scope, and a thread that waits for other workers says so, that they may have the processor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar


class WorkerScope:
    """One worker of this process. By default its only one."""

    def waiting(self) -> AbstractContextManager[None]:
        """Within the block the running thread waits for other workers."""
        return nullcontext()

    def now(self) -> float:
        """Seconds on this worker's clock."""
        return time.perf_counter()

    def step_costs(self, measured: Mapping[str, float]) -> Mapping[str, float]:
        """What a step that ends now took on this worker's clock, given what took how long in this process."""
        return measured

    def exchanged(self) -> None:
        """All workers have told each other a short text, which takes time on a virtual clock."""


_current: ContextVar[WorkerScope] = ContextVar("gossamer_worker", default=WorkerScope())  # noqa: B039 - never changed


def current_worker() -> WorkerScope:
    """The worker that the running code belongs to. A communication thread belongs to who made it."""
    return _current.get()


def enter(worker: WorkerScope) -> None:
    """From now on the running thread, and communication threads that it makes, belong to `worker`."""
    _current.set(worker)
