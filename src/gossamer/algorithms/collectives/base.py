"""Base of collectives: for every rank a table of hops, in integers only, that sums a tensor over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from gossamer.errors import require


class Does(StrEnum):
    """The operation of a rank on pieces in a hop."""

    SEND = "send"
    ADD = "add"  # adds the received pieces to its own
    KEEP = "keep"  # replaces its own pieces by the received ones


@dataclass(frozen=True)
class Hop:
    """In `round`, the pieces first <= p < stop are sent to `peer` (SEND), or received from it (ADD, KEEP)."""

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
    """Base class of collectives: computes a sum over all ranks, as a table of hops for each rank.

    A tensor is cut into `pieces(world)` parts by tensor_split, over its elements; parts of a short tensor may be empty.
    Every rank has a table. Rounds ascend in it; hops of one round are concurrent. A SEND of piece p in round r sends p
    after all hops of this rank on p in rounds below r; rounds of different pieces do not wait for each other. Pieces
    that several peers send in one round are added in the order of the table. Every SEND has one ADD or KEEP at the
    peer, with the same round and pieces.

    Methods are pure functions of integers: every rank computes the tables of all ranks without communication.
    law: the sum of a piece is complete at one rank, its owner, after the owner's last ADD to it; the owner never KEEPs
         it, and all others end with a KEEP of just these bytes
    """

    name: ClassVar[str]

    @abstractmethod
    def pieces(self, world: int) -> int:
        """Return the number of parts that a tensor is cut into."""

    @abstractmethod
    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        """Return the table of one of two or more ranks, by ascending rounds."""

    def hops(self, rank: int, world: int) -> Table:
        """Return the table of `rank` of `world`; empty for a single rank."""
        require(0 <= rank < world, f"rank must be in 0 to {world - 1} for a world of {world}, got {rank}")
        return tuple(self._hops(rank, world)) if world > 1 else ()

    def unlike(self, world: int) -> Sequence[int]:
        """Return ranks that include one with the most pieces sent, and one with the most receivers."""
        return (0,)

    def busiest(self, world: int) -> int:
        """Return the rank that sends the most pieces; of equals the first of `unlike`."""
        return max(self.unlike(world), key=lambda rank: self._pieces_sent(rank, world))

    def _pieces_sent(self, rank: int, world: int) -> int:
        return sum(len(hop.pieces) for hop in self.hops(rank, world) if hop.does is Does.SEND)

    def bytes_sent(self, rank: int, world: int, numel: int, itemsize: int) -> int:
        """Return the payload bytes that `rank` sends for a tensor of `numel` elements of `itemsize` bytes."""
        at = bounds(numel, self.pieces(world))
        sends = (hop for hop in self.hops(rank, world) if hop.does is Does.SEND)
        return sum(at[hop.stop] - at[hop.first] for hop in sends) * itemsize


def bounds(numel: int, pieces: int) -> list[int]:
    """Return the start of each piece of `numel` elements, and the end of the last one: as tensor_split cuts them."""
    size, longer = divmod(numel, pieces)
    return [piece * size + min(piece, longer) for piece in range(pieces + 1)]


def others(rank: int, world: int) -> list[int]:
    """Return all other ranks, starting after `rank`, so that ranks start with different peers."""
    return [(rank + step) % world for step in range(1, world)]
