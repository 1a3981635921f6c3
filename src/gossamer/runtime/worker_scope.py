"""Worker scope: tells which worker of this process the running code belongs to; most processes are one worker.

Where several share a process, as in a simulated job, what a worker has once (its world, its open sessions) is kept by
scope, and a thread that waits for other workers says so, that they may have the processor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar


class WorkerScope:
    """One worker of this process. By default its only one."""

    def waiting(self) -> AbstractContextManager[None]:
        """Within the block the running thread waits for other workers."""
        return nullcontext()


_current: ContextVar[WorkerScope] = ContextVar("gossamer_worker", default=WorkerScope())  # noqa: B039 - never changed


def current_worker() -> WorkerScope:
    """The worker that the running code belongs to. A communication thread belongs to who made it."""
    return _current.get()


def enter(worker: WorkerScope) -> None:
    """From now on the running thread, and communication threads that it makes, belong to `worker`."""
    _current.set(worker)
