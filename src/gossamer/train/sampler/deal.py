"""Deal: division of one epoch's common order among workers, repeated after each change of the workers.

    order    0 1 2 3 4 5 6 7 8 9
    3 deal   0 3 6 9 | 1 4 7 | 2 5 8     every third entry each
    drawn    0 3     | 1     | 2         then one of them is lost
    left     4 5 6 7 8 9
    2 deal   4 6 8 | 5 7 9

law: the entries drawn under all deals of an epoch are disjoint; together with the rest they are the order

A stream of unknown length is divided in the same way while it is read, by `left_of` and `part_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Even = Literal["drop", "pad"]

NO_PLACE = -1  # of a worker after its loop has ended the epoch

# (entries of one place in order, number of deals before, the place) -> the entries in the order of drawing
Arrange = Callable[[Tensor, int, int], Tensor]


def as_dealt(entries: Tensor, deals_before: int, place: int) -> Tensor:
    """Keep the common order."""
    return entries


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The newest deal of one epoch, and one worker's part of it.

    drawn: for each earlier deal, the number of entries drawn at each of its places. A place is an index among the
    workers that share the rest: the rank, unless the epoch was over for some workers.
    """

    total: int  # number of entries of the order
    place: int
    places: int
    drawn: tuple[tuple[int, ...], ...] = ()

    @property
    def left(self) -> int:
        """Number of entries to divide: those not drawn under earlier deals."""
        return self.total - sum(map(sum, self.drawn))

    def count(self, place: int) -> int:
        """Number of entries of one place."""
        return 0 if place == NO_PLACE else len(range(place, self.left, self.places))

    @property
    def part(self) -> int:
        """Number of entries of this worker."""
        return self.count(self.place)

    def entries(self, arrange: Arrange = as_dealt) -> Tensor:
        """Indices in the common order that this worker draws, in the order of drawing. Replays the earlier deals."""
        if self.place == NO_PLACE:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if not self.drawn:
            return arrange(torch.arange(self.place, self.total, self.places, device="cpu"), 0, self.place)
        open_entries = torch.ones(self.total, dtype=torch.bool, device="cpu")
        left = torch.arange(self.total, device="cpu")
        for before, counts in enumerate(self.drawn):
            for place, count in enumerate(counts):
                if count:
                    open_entries[arrange(left[place :: len(counts)], before, place)[:count]] = False
            left = open_entries.nonzero().flatten()
        return arrange(left[self.place :: self.places], len(self.drawn), self.place)


def left_of(items: Iterable[Item], drawn: Sequence[Sequence[int]]) -> Iterator[Item]:
    """Items of a stream that were not drawn under the earlier deals, in order. drawn: as in Deal."""
    reached = [0] * len(drawn)  # number of items divided by each deal
    for item in items:
        for deal, counts in enumerate(drawn):
            row, place = divmod(reached[deal], len(counts))
            reached[deal] += 1
            if row < counts[place]:
                break
        else:
            yield item


def part_of(items: Iterable[Item], place: int, places: int, even: Even | None = None) -> Iterator[Item]:
    """The item at `place` of every row of `places` items. With `even`, all places get the same number of items from an
    incomplete last row: none of it ("drop"), or its first item in place of missing ones ("pad")."""
    if even is None:
        yield from islice(items, place, None, places)
        return
    rest = iter(items)
    for first in rest:
        own, count = first, 1
        for item in islice(rest, places - 1):
            own = item if count == place else own
            count += 1
        if count == places or even == "pad":
            yield own
