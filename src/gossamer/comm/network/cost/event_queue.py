"""Event queue of virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count


@dataclass
class EventQueue:
    """Events in the order of time, then of turns, then in which they were put in."""

    events: list[tuple[float, int, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def at(self, moment: float, happen: Callable[[float], None], turn: int = 0) -> None:
        heappush(self.events, (moment, turn, next(self.numbers), happen))

    def run(self) -> None:
        while self.events:
            moment, _, _, happen = heappop(self.events)
            happen(moment)
