"""Deal: how the entries of one epoch's common order are shared out, again after each change of the workers.

    order    0 1 2 3 4 5 6 7 8 9
    3 deal   0 3 6 9 | 1 4 7 | 2 5 8     every third entry each
    drawn    0 3     | 1     | 2         then one of them is lost
    left     4 5 6 7 8 9
    2 deal   4 6 8 | 5 7 9

law: the entries drawn under all deals of an epoch are disjoint; with what is left they are the order

A stream is dealt out in the same way as it comes, by `left_of` and `part_of`, since nobody knows its length before.
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

NO_PLACE = -1  # of a worker whose loop was told that the epoch is over

# (entries of one place in their order, how many deals came before, the place) -> the same in the order of drawing
Arrange = Callable[[Tensor, int, int], Tensor]


def as_dealt(entries: Tensor, deals_before: int, place: int) -> Tensor:
    """Drawn in the common order."""
    return entries


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The newest deal of one epoch, and the part of it that one worker has.

    drawn: of each deal before, how many entries each of its places drew. A place is a number among those who share
    what is left: the rank, unless somebody's epoch was over.
    """

    total: int  # entries of the order
    place: int
    places: int
    drawn: tuple[tuple[int, ...], ...] = ()

    @property
    def left(self) -> int:
        """Entries that are dealt out, since nobody drew them under a deal before."""
        return self.total - sum(map(sum, self.drawn))

    def count(self, place: int) -> int:
        """Entries of one place."""
        return 0 if place == NO_PLACE else len(range(place, self.left, self.places))

    @property
    def part(self) -> int:
        """Entries of this worker."""
        return self.count(self.place)

    def entries(self, arrange: Arrange = as_dealt) -> Tensor:
        """Places in the common order of what this worker draws, in the order of drawing. Replays the deals before."""
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
    """What of a stream nobody drew under the deals before, in its order; drawn: as in Deal."""
    reached = [0] * len(drawn)  # items that each deal dealt out
    for item in items:
        for deal, counts in enumerate(drawn):
            row, place = divmod(reached[deal], len(counts))
            reached[deal] += 1
            if row < counts[place]:
                break
        else:
            yield item


def part_of(items: Iterable[Item], place: int, places: int, even: Even | None = None) -> Iterator[Item]:
    """Of every row of `places` items the one at `place`; of a last row that is short what there is, or with `even`
    nobody's ("drop"), or its first item for those it has none for ("pad"): as many items at every place."""
    if even is None:
        yield from islice(items, place, None, places)
        return
    rest = iter(items)
    for first in rest:
        mine, count = first, 1
        for item in islice(rest, places - 1):
            mine = item if count == place else mine
            count += 1
        if count == places or even == "pad":
            yield mine
