"""Virtual clock: an event queue in virtual seconds."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class VirtualClock:
    """now: in seconds. Callbacks of the same moment run in the order in which they were queued."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, moment: float, callback: Callable[..., Any], *arguments: Any) -> None:
        heappush(self._queue, (moment, next(self._numbers), callback, arguments))

    def after(self, seconds: float, callback: Callable[..., Any], *arguments: Any) -> None:
        self.at(self.now + seconds, callback, *arguments)

    def run_next(self) -> bool:
        """Run the next callback; False where there is none."""
        if not self._queue:
            return False
        self.now, _, callback, arguments = heappop(self._queue)
        callback(*arguments)
        return True
