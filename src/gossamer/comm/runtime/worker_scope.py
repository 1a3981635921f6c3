"""Worker scope: the worker of this process to which the running code belongs; most processes are one worker.

In a process with several workers, such as a simulated job, per-worker objects (its world, its open sessions) are kept
by scope. A thread that waits for other workers enters `waiting`, so that they can use the processor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from gossamer.base.peer_ops import Peer
from gossamer.comm.runtime.peer_thread import PeerEndpoint


class WorkerScope:
    """One worker of this process. The default is its only one."""

    # Context manager within which the running thread waits for other workers
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    now: Callable[[], float] = time.perf_counter  # seconds on this worker's clock
    is_virtual = False  # whether its clock is not that of this machine

    def wait_for(self, condition: threading.Condition, over: Callable[[], bool]) -> None:
        """Wait, in a block `with condition`, until scripts of this worker's endpoints have made `over()` true."""
        condition.wait_for(over)

    def endpoint(self, peer: Peer) -> PeerEndpoint | None:
        """Return a new endpoint of `peer`, in this worker's process, in a simulated network; None: it needs sockets."""
        return None

    def step_costs(self, measured: Mapping[str, float]) -> Mapping[str, float]:
        """Return the durations in the step that ends now, on a virtual clock. measured: those in this process."""
        return measured

    def compute_seconds(self, measured: float, parts: int) -> float:
        """Return the compute time of parts of a step, on this worker's clock.

        Args:
            measured: the time in this process.
            parts: backward passes or samples of one step, or local steps.
        """
        return measured

    def exchanged(self) -> None:
        """Account for an exchange of a short text between all workers, which takes time on a virtual clock."""


_current: ContextVar[WorkerScope] = ContextVar("gossamer_worker", default=WorkerScope())  # noqa: B039 - never changed


def current_worker() -> WorkerScope:
    """Return the worker of the running code. A communication thread belongs to the worker that created it."""
    return _current.get()


def enter(worker: WorkerScope) -> None:
    """Assign the running thread, and communication threads that it creates later, to `worker`."""

    _current.set(worker)
