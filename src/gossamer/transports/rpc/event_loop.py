"""A thread that waits for sockets and for wishes of other threads; one thing is done after the other.

What must be done soon is done by whoever wants it, where nobody is at it: between two threads every word would wait for
the second to wake up. A lock sees to it that still only one acts at a time.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Wish = Callable[[], None]
Served = Callable[[int], None]


class EventLoop:
    """Which sockets are watched, what is to be done when they are ready, and what other threads want done."""

    def __init__(self) -> None:
        self._alone = threading.Lock()  # held by whoever acts
        self._wishes: deque[Wish] = deque()
        self._calls: deque[Wish] = deque()
        self._awake = False
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[object, tuple[int, Served]] = {}
        self.watch(self._ear, selectors.EVENT_READ, self._hear_bell)

    def post(self, wish: Wish) -> None:
        """Have it done by the loop's thread, in the order of the calls. May be called by any thread."""
        self._wishes.append(wish)
        self.wake()

    def act(self, wish: Wish) -> None:
        """Do it in the calling thread, which may be any; have it done where others are at it or wait for their turn."""
        if self._wishes or self._alone.locked():
            self.post(wish)
        else:
            self.act_alone(wish)

    def act_alone(self, wish: Wish) -> None:
        """Do it in the calling thread, once nobody else is at it; not to be called by whoever is."""
        with self._alone:
            wish()
        self._call()

    def afterwards(self, call: Wish) -> None:
        """Wake another thread, as the last thing that whoever acts does: it may act itself at once."""
        self._calls.append(call)

    def wake(self) -> None:
        """Let the loop's thread look at the clock and at what is wished."""
        if not self._awake:
            self._awake = True
            with suppress(OSError):
                self._bell.send(b"\0")

    def watch(self, connection: socket.socket, events: int, served: Served) -> None:
        """Call `served` with the events that are ready; again with other events where it is watched already."""
        before = self._watched.get(connection)
        if before == (events, served):
            return
        self._watched[connection] = (events, served)
        if before is None:
            self._selector.register(connection, events)
        elif before[0] != events:
            self._selector.modify(connection, events)

    def forget(self, connection: socket.socket) -> None:
        if self._watched.pop(connection, None) is not None:
            self._selector.unregister(connection)

    def turn(self, until: float) -> None:
        """Serve what is ready; wait for it no longer than until time.monotonic() is `until`."""
        found = self._selector.select(max(0.0, until - time.monotonic()))
        with self._alone:
            for key, ready in found:
                watched = self._watched.get(key.fileobj)
                if watched is not None:  # or it was closed by what was served before it
                    watched[1](ready & watched[0])
            self.grant()
        self._call()

    def grant(self) -> None:
        """Do what other threads want done."""
        self._awake = False
        while self._wishes:
            self._wishes.popleft()()

    def close(self) -> None:
        self._selector.close()
        self._ear.close()
        self._bell.close()

    def abandon(self) -> None:
        """Close what a forked child inherited, without a word to the selector, which is the parent's as well."""
        self.post = self.act = lambda wish: None  # type: ignore[method-assign]
        self._ear.close()
        self._bell.close()

    def _call(self) -> None:
        with suppress(IndexError):  # whoever comes first calls
            while self._calls:
                self._calls.popleft()()

    def _hear_bell(self, ready: int) -> None:
        with suppress(BlockingIOError):
            self._ear.recv(4096)
