"""Communication thread: a queue of jobs, executed by one thread in the order in which they were submitted.

Collectives must be issued in the same order on every rank. Completion callbacks and several threads give that up; one
queue keeps it.
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
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import LoopError

T = TypeVar("T")
PATIENCE_SECONDS = 1.0

# Told of a job, and of when its streams will have done what it gave them
Hold = Callable[[StreamMoment, Callable[[], object]], None]


class Waiters:
    """Who waits for a communication thread's jobs; lets that thread wait until somebody does."""

    def __init__(self) -> None:
        self._awaited: list[threading.Event] = []  # whether each is done
        self._changed, self._closed = threading.Condition(), False

    @contextmanager
    def waiting(self, done: threading.Event) -> Iterator[None]:
        """Within the block the caller waits for a job."""
        with self._changed:
            self._awaited.append(done)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._awaited.remove(done)

    def await_one(self) -> None:
        """Wait until somebody waits for a job that is not done, and therefore changes nothing meanwhile. In the
        communication thread, by which jobs get done. Raises LoopError where nobody will any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(not done.is_set() for done in self._awaited))
            if self._closed:
                raise LoopError("the session was closed while its group changed")

    def close(self) -> None:
        """Nobody will wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Work(Generic[T]):
    """A job's place in the queue; `wait` returns its result or raises what it raised."""

    def __init__(
        self,
        job: Callable[[], T],
        streams: CommStreams | None,
        on_failure: Callable[[BaseException], None] | None,
        waiters: Waiters | None = None,
    ) -> None:
        self._job: Callable[[], T] | None = job
        self._waiters = waiters
        self._streams, self._on_failure = streams, on_failure
        self._done = threading.Event()
        self._result: T
        self._failure: BaseException | None = None
        self._ready = None if streams is None else streams.mark()
        self._finished: StreamMoment | None = None

    def run(self, hold: Hold = lambda finished, job: None) -> None:
        """Do the job. hold: told of it before anyone hears that it is done, in the thread that runs it."""
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
        """Whether `wait` returns, or raises, at once."""
        return self._done.is_set()

    def wait(self) -> T:
        if not self._done.is_set():
            with current_worker().waiting(), self._waiters.waiting(self._done) if self._waiters else nullcontext():
                self._done.wait()
        if self._failure is not None:
            raise self._failure
        if self._finished is not None:
            self._finished.precede_current()
        return self._result


class CommThread:
    """Runs jobs one after another in a thread of its own; on CUDA devices, in a stream of its own on each as well.

    After a job has failed every later one fails at once with the same error: the ranks are out of step.
    """

    def __init__(
        self,
        devices: Collection[torch.device],
        meanwhile: Callable[[], bool] = lambda: False,
        recovery: Recovery | None = None,
    ) -> None:
        """devices: where jobs work; the first is their current one. meanwhile: called again and again while nothing is
        queued, for a moment each, until it returns False. recovery: of the group, where it outlives its members."""
        self._devices, self._meanwhile, self.recovery = devices, meanwhile, recovery
        self.is_fixed = recovery is None  # the group has the same members as long as it is there
        self.waiters = Waiters()
        streams = CommStreams(devices)
        self._streams = streams if streams else None  # None on processors
        self._queue: SimpleQueue[Work[object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._beside: list[CommThread] = []
        self._held: deque[tuple[StreamMoment, Callable[[], object]]] = deque()
        self._thread_count = count_of_caller()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="gossamer-comm", daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], T], on_failure: Callable[[BaseException], None] | None = None) -> Work[T]:
        """Queue a job; `on_failure` is called in the thread with the reason why it failed or was never tried."""
        if self._closed:
            raise LoopError("the session is closed, so nothing can be sent any more. Call gossamer.attach(...) again.")
        self._thread_count.look()
        ticket = Work(job, self._streams, on_failure, None if self.is_fixed else self.waiters)
        self._queue.put(ticket)  # type: ignore[arg-type]
        return ticket

    @property
    def is_awaited(self) -> bool:
        """Whether newcomers wait to be let in: alike on every rank."""
        return self.recovery is not None and self.recovery.awaited

    def is_alone(self, world: int) -> bool:
        """Whether no other worker is in the group of `world`, nor will come."""
        return world == 1 and self.is_fixed

    def members(self, world: int) -> Sequence[int]:
        """By rank, numbers that mean the same workers while ranks change."""
        return range(world) if self.recovery is None else self.recovery.members

    def transaction(self, *, admits: bool = False, prepare: Callable[[], object] = lambda: None) -> Transaction:
        """Operations of several jobs that belong together."""
        return Transaction(self.recovery, admits=admits, prepare=prepare)

    def as_transaction(self, job: Callable[[], T], *, admits: bool = False) -> Callable[[], T]:
        """The job, whose operations are a transaction of their own; a job for this thread."""
        return job if self.is_fixed else partial(self.transaction(admits=admits).run, job, last=True)

    def exchange(self, job: Callable[[], T], *, admits: bool = False) -> Work[T]:
        """Queue a job whose operations are a transaction of their own."""
        return self.submit(self.as_transaction(job, admits=admits))

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread: what is sent and remembered is part of no graph
        while (ticket := self._next()) is not None:
            self._thread_count.adopt()
            try:
                if self._failure is not None:
                    raise self._failure
                ticket.run(self._hold)
            except BaseException as failure:  # raised by ticket.wait(), whatever it is
                self._failure = failure
                ticket.fail(failure)

    def _hold(self, finished: StreamMoment, job: Callable[[], object]) -> None:
        """Hold a job as long as the streams read its tensors: the allocator would give their memory to whoever asks
        next on the stream that made them. Nothing on processors."""
        self._held.append((finished, job))
        while self._held and self._held[0][0].is_past():
            self._held.popleft()

    def _next(self) -> Work[object] | None:
        try:
            while self._queue.empty() and self._meanwhile():
                pass
        except BaseException as failure:  # without this thread, ticket.wait() would wait for ever
            self._failure = failure
        return self._queue.get()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in this thread, or in that of one beside it."""
        return threading.current_thread() is self._thread or any(comm_thread.is_here for comm_thread in self._beside)

    def beside(self) -> CommThread:
        """A sibling for a group of its own, which ends with this one at the latest."""
        self._beside.append(CommThread(self._devices))
        return self._beside[-1]

    def close(self) -> None:
        """End the thread after what is queued; waits only a moment, since a peer may have left it waiting for ever."""
        for comm_thread in self._beside:
            comm_thread.close()
        self._closed = True
        self.waiters.close()
        self._queue.put(None)
        with current_worker().waiting():
            self._thread.join(PATIENCE_SECONDS)
