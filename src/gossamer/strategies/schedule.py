"""When workers talk, as tables of integers: a schedule is read before it is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple


class SyncRound(NamedTuple):
    """One exchange: what `fragment` has changed leaves after `launch` backward passes and is used after `landing`."""

    fragment: int
    launch: int
    landing: int


@dataclass(frozen=True)
class PeriodicSchedule:
    """Every fragment once per `period` backward passes, evenly spread; what left is used `delay` passes later.

    list(Periodic(6, fragments=3, delay=1).plan(9)) == [(0, 2, 3), (1, 4, 5), (2, 6, 7), (0, 8, 9)]
    """

    period: int
    fragments: int = 1
    delay: int = 0

    def turn(self, number: int) -> SyncRound:
        """The `number`-th exchange, from 0."""
        periods, fragment = divmod(number, self.fragments)
        launch = periods * self.period + (fragment + 1) * self.period // self.fragments
        return SyncRound(fragment, launch, launch + self.delay)

    def plan(self, passes: int) -> Iterator[SyncRound]:
        """All that leave within so many backward passes, in the order in which they leave."""
        return takewhile(lambda turn: turn.launch <= passes, map(self.turn, count()))

    @property
    def cycle(self) -> tuple[SyncRound, ...]:
        """One period of it, after which it repeats itself."""
        return tuple(map(self.turn, range(self.fragments)))
