"""Event loop: a thread that serves ready sockets and runs tasks of other threads, one at a time.

An urgent task runs in the calling thread if the loop is free, which saves the wake-up of the loop's thread. A lock
keeps everything that runs mutually exclusive.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Task = Callable[[], None]
OnReady = Callable[[int], None]


class EventLoop:
    """Watched sockets with callbacks, and a queue of tasks."""

    def __init__(self) -> None:
        self._exclusive = threading.Lock()  # held by the thread that runs tasks or callbacks
        self._tasks: deque[Task] = deque()
        self._deferred: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []  # a heap of due times, in the order of the calls
        self._later_calls = 0
        self._awake = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[object, tuple[int, OnReady]] = {}
        self.watch(self._wake_receiver, selectors.EVENT_READ, self._drain_wakeups)

    def post(self, task: Task) -> None:
        """Queue a task for the loop's thread, in the order of the calls. Thread-safe."""
        self._tasks.append(task)
        self.wake()

    def run_or_post(self, task: Task) -> None:
        """Run a task in the calling thread; post it if the loop is busy or tasks are queued. Thread-safe."""
        if self._tasks or self._exclusive.locked():
            self.post(task)
        else:
            self.run_exclusively(task)

    def run_exclusively(self, task: Task) -> None:
        """Run a task in the calling thread once the loop is free. Not allowed within a task or callback."""
        with self._exclusive:
            task()
        self._run_deferred()

    def call_after(self, task: Task) -> None:
        """Run `task`, which wakes another thread, after the lock is released, because that thread may need it."""
        self._deferred.append(task)

    def call_later(self, seconds: float, task: Task) -> None:
        """Run a task after some seconds, in the loop's thread."""
        self._later_calls += 1
        heapq.heappush(self._later, (time.monotonic() + seconds, self._later_calls, task))
        self.wake()  # its current wait may end later

    def wake(self) -> None:
        """Make the loop's thread check the clock and its tasks."""
        if not self._awake:
            self._awake = True
            with suppress(OSError):
                self._wake_sender.send(b"\0")

    def watch(self, sock: socket.socket, events: int, on_ready: OnReady) -> None:
        """Call `on_ready` with the ready events. Replaces the events of a socket that is already watched.

        events: 0 for none at present.
        """
        before = self._watched.get(sock)
        if before == (events, on_ready):
            return
        self._watched[sock] = (events, on_ready)
        events_before = 0 if before is None else before[0]
        if not events_before and events:
            self._selector.register(sock, events)
        elif events_before and not events:
            self._selector.unregister(sock)
        elif events_before != events:
            self._selector.modify(sock, events)

    def unwatch(self, sock: socket.socket) -> None:
        watched = self._watched.pop(sock, None)
        if watched is not None and watched[0]:
            self._selector.unregister(sock)

    def run_once(self, until: float) -> None:
        """Serve ready sockets, then run tasks. Blocks at most until time.monotonic() is `until`."""
        if self._later:
            until = min(until, self._later[0][0])
        selected = self._selector.select(max(0.0, until - time.monotonic()))
        with self._exclusive:
            for key, ready in selected:
                watched = self._watched.get(key.fileobj)
                if watched is not None:  # an earlier callback may have closed it
                    watched[1](ready & watched[0])
            self.run_tasks()
        self._run_deferred()

    def run_tasks(self) -> None:
        """Run the tasks that other threads have posted."""
        self._awake = False
        while self._tasks:
            self._tasks.popleft()()
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def close(self) -> None:
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def abandon(self) -> None:
        """Close the sockets that a forked child inherited, without using the selector, which the parent shares."""
        self.post = self.run_or_post = lambda task: None  # type: ignore[method-assign]
        self._wake_receiver.close()
        self._wake_sender.close()

    def _run_deferred(self) -> None:
        with suppress(IndexError):  # another thread may take the last one
            while self._deferred:
                self._deferred.popleft()()

    def _drain_wakeups(self, ready: int) -> None:
        with suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
