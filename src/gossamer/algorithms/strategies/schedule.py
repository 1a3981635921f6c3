"""Schedules: when sync rounds leave and land, as tables of integers that can be read before they are run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple


class SyncRound(NamedTuple):
    """One round: changes of `fragment` leave after `launch` steps and are used after `landing`."""

    fragment: int
    launch: int
    landing: int


@dataclass(frozen=True)
class PeriodicSchedule:
    """Every fragment once per `period` steps, evenly spread; a round lands `delay` steps after its launch.

    list(PeriodicSchedule(6, fragments=3, delay=1).rounds_until(9)) == [(0, 2, 3), (1, 4, 5), (2, 6, 7), (0, 8, 9)]
    """

    period: int
    fragments: int = 1
    delay: int = 0

    def sync_round(self, number: int) -> SyncRound:
        """The `number`-th round, from 0."""
        periods, fragment = divmod(number, self.fragments)
        launch = periods * self.period + (fragment + 1) * self.period // self.fragments
        return SyncRound(fragment, launch, launch + self.delay)

    def rounds_until(self, passes: int) -> Iterator[SyncRound]:
        """All rounds that leave within so many steps, in the order in which they leave."""
        return takewhile(lambda each: each.launch <= passes, map(self.sync_round, count()))

    @property
    def period_rounds(self) -> tuple[SyncRound, ...]:
        """The rounds of one period, after which the schedule repeats itself."""
        return tuple(map(self.sync_round, range(self.fragments)))
