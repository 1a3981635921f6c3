"""Schedules: the steps at which sync rounds start and land, as tables of integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import NamedTuple

from gossamer.errors import require


class SyncRound(NamedTuple):
    """One round: `fragment` is sent after step `launch`, and its mean is applied after step `landing`."""

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
        """Return round `number`, counted from 0."""
        periods, fragment = divmod(number, self.fragments)
        launch = periods * self.period + (fragment + 1) * self.period // self.fragments
        return SyncRound(fragment, launch, launch + self.delay)

    def rounds_until(self, passes: int) -> Iterator[SyncRound]:
        """Return the rounds that start within `passes` steps, in order."""
        return takewhile(lambda each: each.launch <= passes, map(self.sync_round, count()))

    @property
    def period_rounds(self) -> tuple[SyncRound, ...]:
        """The rounds of one period, after which the schedule repeats."""
        return tuple(map(self.sync_round, range(self.fragments)))


def check_fragments(period: int, fragments: int) -> None:
    """Raise ValueError unless a period has a step for each fragment."""
    require(fragments >= 1, f"fragments must be a number of parts, 1 or more, got {fragments}")
    require(
        fragments <= period,
        f"fragments must be at most period={period}, since each needs a step of its own, got {fragments}. Write "
        f"fragments={period}.",
    )
