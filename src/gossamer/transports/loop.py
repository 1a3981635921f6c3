"""A thread that waits for sockets and for wishes of other threads, and does one thing after the other."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Wish = Callable[[], None]
Served = Callable[[int], None]


class Loop:
    """Which sockets are watched, what is to be done when they are ready, and what other threads want done."""

    def __init__(self) -> None:
        self._wishes: deque[Wish] = deque()
        self._awake = False
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self.watch(self._ear, selectors.EVENT_READ, self._hear_bell)

    def post(self, wish: Wish) -> None:
        """Have it done by the loop's thread, in the order of the calls. May be called by any thread."""
        self._wishes.append(wish)
        if not self._awake:
            self._awake = True
            with suppress(OSError):
                self._bell.send(b"\0")

    def watch(self, connection: socket.socket, events: int, served: Served) -> None:
        """Call `served` with the events that are ready; again with other events where it is watched already."""
        try:
            key = self._selector.get_key(connection)
        except KeyError:
            self._selector.register(connection, events, served)
            return
        if key.events != events or key.data != served:
            self._selector.modify(connection, events, served)

    def _is_watched(self, connection: Any) -> bool:
        with suppress(KeyError, ValueError):
            self._selector.get_key(connection)
            return True
        return False

    def forget(self, connection: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def turn(self, until: float) -> None:
        """Serve what is ready; wait for it no longer than until time.monotonic() is `until`."""
        for key, ready in self._selector.select(max(0.0, until - time.monotonic())):
            if self._is_watched(key.fileobj):  # or it was closed by what was served before it
                key.data(ready)
        self.grant()

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
        self.post = lambda wish: None  # type: ignore[method-assign]
        self._ear.close()
        self._bell.close()

    def _hear_bell(self, ready: int) -> None:
        with suppress(BlockingIOError):
            self._ear.recv(4096)
