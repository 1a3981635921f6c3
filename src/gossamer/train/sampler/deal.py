"""Deal: division of one epoch's common order among workers, repeated after each change of the workers.

    order    0 1 2 3 4 5 6 7 8 9
    3 deal   0 3 6 9 | 1 4 7 | 2 5 8     every third entry each
    drawn    0 3     | 1     | 2         then one of them is lost
    left     4 5 6 7 8 9
    2 deal   4 6 8 | 5 7 9

law: the entries drawn under all deals of an epoch are disjoint; together with the rest they are the order

A worker may own several adjacent places, so that its part follows its speed:

    widths 2 1   0 1 3 4 6 7 9 | 2 5 8   places 0 and 1 | place 2
    drawn        0 1 3         | 2       (2, 1, 1): place 0 has 2 of the first worker's 3 draws

law: workers that draw in proportion to their widths reach the end of their parts within one row of each other

A stream of unknown length is divided in the same way while it is read, by `left_of` and `part_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    drawn: for each earlier deal, the number of entries drawn at each of its places. The first place of a worker is the
    sum of the widths of the workers before it that share the rest: its rank, if all have one place and the epoch is
    over for no worker.
    """

    total: int  # number of entries of the order
    place: int  # the first one of this worker
    places: int  # of all workers
    width: int = 1  # number of places of this worker: place, place + 1, ...
    drawn: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def left(self) -> int:
        """Number of entries to divide: those not drawn under earlier deals."""
        return self.total - sum(map(sum, self.drawn))

    def count(self, place: int) -> int:
        """Number of entries of one place."""
        return 0 if place == NO_PLACE else len(range(place, self.left, self.places))

    @cached_property
    def part(self) -> int:
        """Number of entries of this worker."""
        if self.place == NO_PLACE:
            return 0
        rows, rest = divmod(self.left, self.places)
        return rows * self.width + min(max(rest - self.place, 0), self.width)

    def counts(self, drawn: int) -> list[int]:
        """The first `drawn` entries of this worker, counted at each of its places."""
        rows, rest = divmod(drawn, self.width)
        return [rows + (place < rest) for place in range(self.width)]

    def entries(self, arrange: Arrange = as_dealt) -> Tensor:
        """Indices in the common order that this worker draws, in the order of drawing. Replays the earlier deals.

        Args:
            arrange: another order of each worker's entries; all workers must then have one place in every deal.
        """
        if self.place == NO_PLACE:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        left = torch.arange(self.total, device="cpu")
        for before, counts in enumerate(self.drawn):
            left = _undrawn(left, counts, arrange, before)
        if self.width == 1:
            return arrange(left[self.place :: self.places], len(self.drawn), self.place)
        places = torch.arange(len(left), device="cpu") % self.places
        return left[(self.place <= places) & (places < self.place + self.width)]


def _undrawn(left: Tensor, counts: Sequence[int], arrange: Arrange, before: int) -> Tensor:
    """Entries of `left` that were not drawn under a deal. counts: draws by place; before: number of deals before it."""
    if arrange is as_dealt:
        numbers = torch.arange(len(left), device="cpu")
        return left[numbers // len(counts) >= torch.tensor(counts, device="cpu")[numbers % len(counts)]]
    drawn = [arrange(left[place :: len(counts)], before, place)[:count] for place, count in enumerate(counts) if count]
    return left[~torch.isin(left, torch.cat(drawn))] if drawn else left


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


def part_of(
    items: Iterable[Item], place: int, places: int, even: Even | None = None, *, width: int = 1
) -> Iterator[Item]:
    """The `width` items from `place` on of every row of `places` items. With `even`, all places get the same number of
    items from an incomplete last row: none of it ("drop"), or its first item in place of missing ones ("pad")."""
    own = range(place, place + width)
    if even is None:
        yield from (item for number, item in enumerate(items) if number % places in own)
        return
    rest = iter(items)
    for first in rest:
        kept, count = [first] * (place == 0), 1
        for item in islice(rest, places - 1):
            if count in own:
                kept.append(item)
            count += 1
        if count == places or even == "pad":
            yield from (*kept, *[first] * (width - len(kept)))
