"""Recursive halving and doubling: a reduce-scatter and an all-gather among ranks at power-of-two distances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Collective):
    """Exchange halves with the rank at distance 1, quarters with the one at distance 2, and so on; then in reverse.

    m pieces, m the largest power of two up to n. Of the first 2 (n - m) ranks every odd one is idle: it sends its
    tensor to the rank before it, and receives the sum in the end. The m others, renumbered from 0, exchange at distance
    1, 2, ..., m/2 while they add, at m/2, ..., 2, 1 while they keep; the lower of two keeps the lower half.
    bytes:    2 N (m-1)/m a rank, N more for one with an idle partner; N for an idle rank
    messages: 2 log2 m a rank, 1 more for one with an idle partner; 1 for an idle rank; in 2 log2 m rounds, 2 more if n
              is not a power of two
    source:   Rabenseifner 2004, ICCS; Thakur, Rabenseifner & Gropp 2005, IJHPCA

    Adjacent ranks exchange the most bytes, distant ranks the fewest.
    """

    name: ClassVar[str] = "halving"

    def pieces(self, world: int) -> int:
        return 1 << (world.bit_length() - 1)

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        members = self.pieces(world)
        surplus, last = world - members, 2 * (members.bit_length() - 1) + 1
        if rank < 2 * surplus and rank % 2:
            yield Hop(0, Does.SEND, rank - 1, 0, members)
            yield Hop(last, Does.KEEP, rank - 1, 0, members)
            return
        folds = rank < 2 * surplus
        if folds:
            yield Hop(0, Does.ADD, rank + 1, 0, members)
        yield from _swaps(rank // 2 if folds else rank - surplus, members, surplus)
        if folds:
            yield Hop(last, Does.SEND, rank + 1, 0, members)


def _swaps(member: int, members: int, surplus: int) -> Iterator[Hop]:
    """Return the hops of one of `members`, a power of two: its range is halved down to one piece, then doubled."""
    start = 1 if surplus else 0
    first, stop, way = 0, members, []
    for power in range(members.bit_length() - 1):
        middle, upper = (first + stop) // 2, member >> power & 1
        kept, given = ((middle, stop), (first, middle)) if upper else ((first, middle), (middle, stop))
        peer = _rank_of(member ^ 1 << power, surplus)
        yield Hop(start + power, Does.SEND, peer, *given)
        yield Hop(start + power, Does.ADD, peer, *kept)
        way.append((peer, kept, given))
        first, stop = kept
    for back, (peer, kept, given) in enumerate(reversed(way), start + len(way)):
        yield Hop(back, Does.SEND, peer, *kept)
        yield Hop(back, Does.KEEP, peer, *given)


def _rank_of(member: int, surplus: int) -> int:
    return 2 * member if member < surplus else member + surplus
