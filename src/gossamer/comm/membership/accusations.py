"""Accusations: choose whom a coordinator puts out when members that all live cannot go on together, again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

TRIES = 3  # views in a row that broke, before somebody is put out
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
FORGOTTEN_AFTER_SECONDS = 600.0  # a view that held for so long went on, whether anybody says so or not

Accusation = tuple[int, int]  # numbers of who accuses and who is accused


def least_connected(members: Sequence[int], accusations: Iterable[Accusation]) -> int | None:
    """The member that the fewest others are connected to; of several the one that came last.

    members: in the order in which they came. Two are connected unless one of them accuses the other: whose word is
    right nobody can tell. None where nobody of them accuses another.
    """
    pairs = {frozenset(each) for each in accusations if each[0] != each[1] and set(each) <= set(members)}
    if not pairs:
        return None
    apart = {member: sum(member in pair for pair in pairs) for member in members}
    return max(members, key=lambda member: (apart[member], members.index(member)))


@dataclass
class AccusationRecord:
    """What was said in the views that broke one after the other, without a loss that would explain it."""

    _views: list[frozenset[Accusation]] = field(default_factory=list)  # the last TRIES
    _count: int = 0  # of all of them

    def broke(self, accusations: Set[Accusation], *, explained: bool, went_on: bool, seconds: float) -> None:
        """A view broke. explained: somebody was lost. went_on: something was completed in it. seconds: it held."""
        if explained or went_on or seconds > FORGOTTEN_AFTER_SECONDS:
            self.clear()
        if not explained:
            self._views = [*self._views, frozenset(accusations)][-TRIES:]
            self._count += 1

    def pause_seconds(self) -> float:
        """Before the next view: views that break at once must not follow each other as fast as they can."""
        doublings = min(self._count - 2, 10)
        return 0.0 if doublings < 0 else min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)

    def whom(self, members: Sequence[int]) -> int | None:
        """Who is to be put out by now, if anybody: where somebody was accused in each of so many views."""
        if len(self._views) < TRIES or not all(self._views):
            return None
        return least_connected(members, {each for view in self._views for each in view})

    def clear(self) -> None:
        self._views, self._count = [], 0
