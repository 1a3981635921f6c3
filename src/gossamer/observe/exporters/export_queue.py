"""Export queue: what stands between training and a tool, so that a step is never blocked or ended by one.

The training thread only puts events into a bounded queue. A thread takes them out and calls the tool; what the tool
refuses, and what comes while the queue is full, is dropped and counted. The user is told once, and of the count at the
end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gossamer import events
from gossamer.events import Attached, Event, GroupChanged, Logged, StepEnded

TAKEN = (Attached, StepEnded, Logged, GroupChanged)
ROOM = 100_000  # numbers that may wait: some 10 MB
LOOK_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0  # after a tool has failed; it doubles until then
CLOSE_SECONDS = 10.0  # for tools to take what is left, all together


class Exporter(Protocol):
    """A tool, called by one thread. Both may raise anything."""

    def take(self, events: Sequence[Event], /) -> None: ...

    def close(self) -> None: ...


class ExportQueue:
    """A listener. name: of the destination, in what the user is told; open_exporter: called before the first events.

    room: how many numbers may wait; an event is one, and one for each metric in it.
    """

    def __init__(self, name: str, open_exporter: Callable[[], Exporter], room: int = ROOM) -> None:
        self.dropped = self.taken = 0  # events
        self._name, self._open, self._room = name, open_exporter, room
        self._exporter: Exporter | None = None
        self._waiting: list[Event] = []
        self._numbers = 0  # in them
        self._lock = threading.Lock()  # of these two, and never held while anything else is done
        self._told = False
        self._process = os.getpid()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, TAKEN) or os.getpid() != self._process:
            return
        numbers = _numbers(event)
        with self._lock:
            full = self._numbers + numbers > self._room
            if not full:
                self._waiting.append(event)
                self._numbers += numbers
        if full:
            self._drop(1, "it does not keep up")

    def pump(self) -> bool:
        """Let the tool take what waits; whether it did."""
        try:
            if self._exporter is None and self._waiting:
                self._exporter = self._open()
        except BaseException as error:  # a tool may even call sys.exit, and training goes on
            self._tell(reason(error))
            return False
        batch = self._next()
        try:
            if self._exporter is not None and batch:
                self._exporter.take(batch)
        except BaseException as error:
            self._drop(len(batch), reason(error))
            return False
        self.taken += len(batch)
        return True

    def finish(self) -> None:
        """Let the tool take what is left, and close it."""
        self.pump()
        self.dropped += len(self._next())
        try:
            if self._exporter is not None:
                self._exporter.close()
        except BaseException as error:
            self._tell(reason(error))

    def tell_dropped(self) -> None:
        """At the end: how much is missing, if anything is."""
        missing = self.dropped + len(self._waiting)
        if missing:
            events.notice(f"{missing} of {self.taken + missing} events of this worker never came to {self._name}.")

    def _next(self) -> list[Event]:
        with self._lock:
            batch, self._waiting, self._numbers = self._waiting, [], 0
        return batch

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            events.notice(
                f"{self._name} takes no numbers of this worker now ({why}). Training goes on; it is tried again, and "
                "what does not fit into the queue meanwhile is dropped and counted."
            )


class ExportThread:
    """Pumps a queue until it is closed."""

    def __init__(self, queue: ExportQueue) -> None:
        self._queue = queue
        self._closing = threading.Event()
        self._unsubscribe = events.subscribe(queue, shows_notices=False)
        self._thread = threading.Thread(target=self._run, name="gossamer-export", daemon=True)
        self._thread.start()

    def ask_to_close(self) -> None:
        self._unsubscribe()
        self._closing.set()

    def wait(self, deadline: float) -> None:
        """Until what was left is taken, or until this moment of time.monotonic()."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._queue.tell_dropped()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closing.wait(pause):
            pause = LOOK_SECONDS if self._queue.pump() else min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._queue.finish()


def _numbers(event: Event) -> int:
    return 1 + len(event.values) if isinstance(event, Logged) else 1


def reason(error: BaseException) -> str:
    """In a few words and one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]
