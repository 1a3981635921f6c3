"""Virtual clock: events in the order of virtual time. Every simulation of messages or peers runs on one.

    clock = VirtualClock()
    clock.after(2.0, print, "two seconds later")
    clock.run()

Simulations on it are deterministic: events of one moment run by turn, then in the order in which they were queued.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any


class VirtualClock:
    """A queue of callbacks in virtual time. now: the moment of the latest callback, in seconds."""

    __slots__ = ("_numbers", "_queue", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, int, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, moment: float, callback: Callable[..., Any], *arguments: Any, turn: int = 0) -> None:
        """Call `callback(*arguments)` at a moment. turn: lower ones come first among callbacks of one moment."""
        heappush(self._queue, (moment, turn, next(self._numbers), callback, arguments))

    def after(self, seconds: float, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call `callback(*arguments)` so many seconds from now."""
        self.at(self.now + seconds, callback, *arguments)

    @property
    def next_moment(self) -> float:
        """The moment of the next callback; infinity if the queue is empty."""
        return self._queue[0][0] if self._queue else inf

    def run_next(self) -> bool:
        """Run the next callback; False if the queue is empty."""
        if not self._queue:
            return False
        self.now, _, _, callback, arguments = heappop(self._queue)
        callback(*arguments)
        return True

    def run(self, until: float = inf) -> None:
        """Run all callbacks up to a moment, those of the moment included. Then it is that moment, if it is finite."""
        while self._queue and self._queue[0][0] <= until:
            self.run_next()
        if until < inf:
            self.now = max(self.now, until)
