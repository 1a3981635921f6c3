"""One lane: a queue and a thread that does all the talking, in the order in which jobs were handed in.

Collectives must be issued in the same order on every rank. Whoever issues them from completion callbacks or from
several threads gives that up; one queue keeps it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Ticket(Generic[T]):
    """A job's place in the queue; `wait` returns its result or raises what it raised."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._done = threading.Event()
        self._result: T
        self._failure: BaseException | None = None
        self._ready = _record_event()
        self._finished: torch.cuda.Event | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        assert self._job is not None
        try:
            if stream is None:
                self._result = self._job()
            else:
                with torch.cuda.stream(stream):
                    if self._ready is not None:
                        stream.wait_event(self._ready)
                    self._result = self._job()
                    self._finished = stream.record_event()
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._job = None
            self._done.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._done.set()

    def wait(self) -> T:
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)
        return self._result


class Lane:
    """Runs jobs one after another in a thread of its own; on a CUDA device, in a stream of its own as well.

    After a job has failed every later one fails at once with the same error: the ranks are out of step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Ticket[object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="gossamer-lane", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        ticket = Ticket(job)
        self._queue.put(ticket)  # type: ignore[arg-type]
        return ticket

    def _work(self) -> None:
        while (ticket := self._queue.get()) is not None:
            if self._failure is not None:
                ticket.fail(self._failure)
                continue
            try:
                ticket.run(self._stream)
            except BaseException as failure:  # whoever waits for the ticket gets it, whatever it is
                self._failure = failure

    def close(self) -> None:
        """End the thread after what is queued; does not wait for it, since a peer may have left it waiting for ever."""
        self._queue.put(None)


def _record_event() -> torch.cuda.Event | None:
    """The moment up to which the submitting thread's work on the GPU must be done before the job may start."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
