"""Communication thread: a queue of jobs, executed by one thread in the order of submission.

Collectives must be issued in the same order on every rank. Completion callbacks and several threads would violate that;
a single queue guarantees it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from gossamer.base.kernels.threads import count_of_caller
from gossamer.comm.runtime.comm_streams import CommStreams, StreamMoment
from gossamer.comm.runtime.transaction import Recovery, Transaction
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.errors import LoopError

T = TypeVar("T")
PATIENCE_SECONDS = 1.0

# Receives a job, and the events after which its streams have completed the job's work
Hold = Callable[[StreamMoment, Callable[[], object]], None]


class Waiters:
    """Threads that wait for a communication thread's jobs. That thread can wait until there is one."""

    def __init__(self) -> None:
        self._awaited: list[threading.Event] = []  # completion events of awaited jobs
        self._changed, self._closed = threading.Condition(), False

    @contextmanager
    def waiting(self, done: threading.Event) -> Iterator[None]:
        """Context manager within which the caller waits for a job."""
        with self._changed:
            self._awaited.append(done)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._awaited.remove(done)

    def await_one(self) -> None:
        """Block the communication thread until another thread waits for an unfinished job, and so modifies nothing.
        Raises LoopError after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(not done.is_set() for done in self._awaited))
            if self._closed:
                raise LoopError("the session was closed while its group changed")

    def close(self) -> None:
        """End all waits, because no thread will wait for a job any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Work(Generic[T]):
    """A queued job. `wait` returns its result or raises its error."""

    def __init__(
        self,
        job: Callable[[], T],
        streams: CommStreams | None,
        on_failure: Callable[[BaseException], None] | None,
        worker: WorkerScope,
        waiters: Waiters | None = None,
    ) -> None:
        self._job: Callable[[], T] | None = job
        self._worker, self._waiters = worker, waiters
        self._streams, self._on_failure = streams, on_failure
        self._done = threading.Event()
        self._result: T
        self._failure: BaseException | None = None
        self._ready = None if streams is None else streams.mark()
        self._finished: StreamMoment | None = None

    def run(self, hold: Hold = lambda finished, job: None) -> None:
        """Run the job. hold: called in this thread before the job is marked as done."""
        assert self._job is not None
        try:
            if self._streams is None or self._ready is None:
                self._result = self._job()
            else:
                with self._streams.entered():
                    self._ready.precede_current()
                    self._result = self._job()
                    self._finished = self._streams.mark()
                hold(self._finished, self._job)
        finally:
            self._job = None
        self._done.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        if self._on_failure is not None:
            self._on_failure(failure)
        self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns or raises without blocking."""
        return self._done.is_set()

    def wait(self) -> T:
        if not self._done.is_set():
            with self._worker.waiting(), self._waiters.waiting(self._done) if self._waiters else nullcontext():
                self._done.wait()
        if self._failure is not None:
            raise self._failure
        if self._finished is not None:
            self._finished.precede_current()
        return self._result


class CommThread:
    """Runs jobs one after another in a separate thread, on CUDA devices also in a separate stream.

    After a job has failed, every later one fails at once with the same error, because the ranks are out of step.

    Args:
        devices: Devices that jobs use; the first is their current device.
        meanwhile: Called repeatedly while the queue is empty, for a moment each, until it returns False.
        recovery: The group's recovery, if its members can change in lock step.
        fixed: Whether the group's members never change; None: without a recovery.
    """

    def __init__(
        self,
        devices: Collection[torch.device],
        meanwhile: Callable[[], bool] = lambda: False,
        recovery: Recovery | None = None,
        fixed: bool | None = None,
    ) -> None:
        self._devices, self._meanwhile, self.recovery = devices, meanwhile, recovery
        self.is_fixed = recovery is None if fixed is None else fixed  # the group's members never change
        self.waiters = Waiters()
        streams = CommStreams(devices)
        self._streams = streams if streams else None  # None without CUDA devices
        self._queue: SimpleQueue[Work[object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._siblings: list[CommThread] = []
        self._held: deque[tuple[StreamMoment, Callable[[], object]]] = deque()
        self._thread_count = count_of_caller()
        self._worker = current_worker()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="gossamer-comm", daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], T], on_failure: Callable[[BaseException], None] | None = None) -> Work[T]:
        """Queue a job. `on_failure` is called in the thread with the error if it failed or was never run."""
        if self._closed:
            raise LoopError("the session is closed, so nothing can be sent. Call gossamer.attach(...) again.")
        count = self._thread_count
        if threading.get_ident() == count.owner and torch.get_num_threads() != count.count:  # rarely
            count.look()
        ticket = Work(job, self._streams, on_failure, self._worker, None if self.is_fixed else self.waiters)
        self._queue.put(ticket)  # type: ignore[arg-type]
        return ticket

    @property
    def is_awaited(self) -> bool:
        """Whether newcomers wait for admission; equal on every rank."""
        return self.recovery is not None and self.recovery.awaited

    def is_alone(self, world: int) -> bool:
        """Whether the group of `world` has no other worker, now or later."""
        return world == 1 and self.is_fixed

    def members(self, world: int) -> Sequence[int]:
        """Return by rank the numbers that identify workers while ranks change."""
        return range(world) if self.recovery is None else self.recovery.members

    def transaction(self, *, admits: bool = False, prepare: Callable[[], object] = lambda: None) -> Transaction:
        """Create a transaction, for the operations of several jobs that belong together."""
        return Transaction(self.recovery, admits=admits, prepare=prepare)

    def as_transaction(self, job: Callable[[], T], *, admits: bool = False) -> Callable[[], T]:
        """Wrap a job, to run in this thread, so that its operations are a transaction."""
        return job if self.is_fixed else partial(self.transaction(admits=admits).run, job, last=True)

    def exchange(self, job: Callable[[], T], *, admits: bool = False) -> Work[T]:
        """Queue a job that is a transaction."""
        return self.submit(self.as_transaction(job, admits=admits))

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # in this thread: sent and stored tensors need no graph
        adopted = 0  # number of threads that this one uses
        while (ticket := self._next()) is not None:
            if adopted != self._thread_count.count:
                adopted = self._thread_count.adopt()
            try:
                if self._failure is not None:
                    raise self._failure
                ticket.run(self._hold)
            except BaseException as failure:  # re-raised by ticket.wait()
                self._failure = failure
                ticket.fail(failure)

    def _hold(self, finished: StreamMoment, job: Callable[[], object]) -> None:
        """Keep a job alive while streams read its tensors; otherwise the allocator could reuse their memory on the
        stream that created them. Has no effect without CUDA devices."""
        self._held.append((finished, job))
        while self._held and self._held[0][0].is_past():
            self._held.popleft()

    def _next(self) -> Work[object] | None:
        try:
            while self._queue.empty() and self._meanwhile():
                pass
        except BaseException as failure:  # must not end this thread, or ticket.wait() would block forever
            self._failure = failure
        return self._queue.get()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in this thread or in that of a sibling."""
        return threading.current_thread() is self._thread or any(comm_thread.is_here for comm_thread in self._siblings)

    def sibling(self) -> CommThread:
        """Create a sibling for a separate group, which is closed together with this one."""
        self._siblings.append(CommThread(self._devices))
        return self._siblings[-1]

    def close(self) -> None:
        """End the thread after the queued jobs. Waits only a moment, because a lost peer may block it forever."""
        for comm_thread in self._siblings:
            comm_thread.close()
        self._closed = True
        self.waiters.close()
        self._queue.put(None)
        # Garbage is collected on any thread: another worker may hold a lock now, such as that of an import, for which
        # the worker that ran instead of it would wait forever
        is_own = current_worker() is self._worker
        with self._worker.waiting() if is_own else nullcontext():
            self._thread.join(PATIENCE_SECONDS)
