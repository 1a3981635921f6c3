"""Ring all-reduce: each rank sends to the next one only, and every piece makes two rounds of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class RingAllReduce(Collective):
    """Every piece passes the ring once while ranks add to it, and again, complete, while they keep it.

    n pieces; in round t the rank in place i sends piece i - t - 1 to place i + 1 (mod n); adds until round n - 2
    bytes:    2 N (n-1)/n a rank, over one link out and one in
    messages: 2 (n-1) a rank, in 2 (n-1) rounds
    source:   Patarasuk & Yuan 2009, JPDC

    order: the ranks in their order along the ring, to follow fast links; None: by rank. The piece of place i has the
    number of the rank at that place, which owns it.
    """

    name: ClassVar[str] = "ring"
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(
            self.order is None or sorted(self.order) == list(range(len(self.order))),
            f"order must have each of the ranks 0 to n - 1 once, got {self.order}",
        )

    def pieces(self, world: int) -> int:
        return world

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        order = self._order(world)
        place = order.index(rank)
        to, of = order[(place + 1) % world], order[place - 1]
        for turn in range(2 * (world - 1)):
            sent, received = order[(place - turn - 1) % world], order[(place - turn - 2) % world]
            yield Hop(turn, Does.SEND, to, sent, sent + 1)
            yield Hop(turn, Does.ADD if turn < world - 1 else Does.KEEP, of, received, received + 1)

    def _order(self, world: int) -> tuple[int, ...]:
        order = tuple(range(world)) if self.order is None else self.order
        require(
            len(order) == world,
            f"order has {len(order)} ranks, and there are {world}. Write order=None for a ring by rank.",
        )
        return order
