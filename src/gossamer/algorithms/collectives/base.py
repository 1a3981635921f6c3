"""Base of collectives: for every rank a table of hops, in integers only, that sums a tensor over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from gossamer.errors import require


class Does(StrEnum):
    """What a rank does with pieces in a hop."""

    SEND = "send"
    ADD = "add"  # what is received, to what is held
    KEEP = "keep"  # what is received, instead of what is held


@dataclass(frozen=True)
class Hop:
    """In `round`, the pieces first <= p < stop go to `peer` (SEND), or come from it (ADD, KEEP)."""

    round: int
    does: Does
    peer: int
    first: int
    stop: int

    @property
    def pieces(self) -> range:
        return range(self.first, self.stop)


Table = tuple[Hop, ...]


class Collective(ABC):
    """A way to compute a sum over all ranks, as a table of hops for each rank.

    A tensor is cut into `pieces(world)` parts by tensor_split, over its elements; some are empty where it is short.
    Every rank has a table. Rounds ascend in it, and what has one round goes on side by side. A SEND of piece p in round
    r sends what p holds after all that this rank's hops of rounds below r do to p; rounds of different pieces do not
    wait for each other. What several peers add to p in one round is added in the order of the table. To every SEND
    belongs one ADD or KEEP at the peer, of the same round and the same pieces.

    Pure functions of integers: every rank computes the table of every other, and nothing is agreed upon over a network.
    law: the sum of a piece is complete at one rank, its owner, after the owner's last ADD to it; the owner never KEEPs
         it, and all others end with a KEEP of just these bytes
    """

    name: ClassVar[str]

    @abstractmethod
    def pieces(self, world: int) -> int:
        """How many parts a tensor is cut into."""

    @abstractmethod
    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        """The table of one of two ranks or more, by ascending rounds."""

    def hops(self, rank: int, world: int) -> Table:
        """What `rank` of `world` does to have the sum; nothing where it is alone. rank: in range(world)."""
        require(0 <= rank < world, f"ranks of a world of {world} are 0 to {world - 1}, and {rank} is none of them")
        return tuple(self._hops(rank, world)) if world > 1 else ()

    def unlike(self, world: int) -> Sequence[int]:
        """Ranks of which one sends as many pieces as any other rank does, and one to as many others."""
        return (0,)

    def busiest(self, world: int) -> int:
        """The rank that sends most pieces; of equals the first of `unlike`."""
        return max(self.unlike(world), key=lambda rank: self._pieces_sent(rank, world))

    def _pieces_sent(self, rank: int, world: int) -> int:
        return sum(len(hop.pieces) for hop in self.hops(rank, world) if hop.does is Does.SEND)

    def bytes_sent(self, rank: int, world: int, numel: int, itemsize: int) -> int:
        """Payload bytes that `rank` sends for a tensor of `numel` elements of `itemsize` bytes."""
        at = bounds(numel, self.pieces(world))
        sends = (hop for hop in self.hops(rank, world) if hop.does is Does.SEND)
        return sum(at[hop.stop] - at[hop.first] for hop in sends) * itemsize


def bounds(numel: int, pieces: int) -> list[int]:
    """Where each piece of `numel` elements begins, and where the last one ends: as tensor_split cuts them."""
    size, longer = divmod(numel, pieces)
    return [piece * size + min(piece, longer) for piece in range(pieces + 1)]


def others(rank: int, world: int) -> list[int]:
    """All other ranks, beginning after `rank`, so that not all begin with the same one."""
    return [(rank + step) % world for step in range(1, world)]
