"""Virtual time: what happens next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class VirtualClock:
    """now: the moment, in seconds. What was put at the same moment happens in the order in which it was put there."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, moment: float, happen: Callable[..., Any], *what: Any) -> None:
        heappush(self._queue, (moment, next(self._numbers), happen, what))

    def later(self, seconds: float, happen: Callable[..., Any], *what: Any) -> None:
        self.at(self.now + seconds, happen, *what)

    def tick(self) -> bool:
        """Let the next thing happen; False where there is none."""
        if not self._queue:
            return False
        self.now, _, happen, what = heappop(self._queue)
        happen(*what)
        return True
