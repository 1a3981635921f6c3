"""Hub collectives: all ranks exchange with one of them, the hub, which sums or copies for the others.

Every other rank sends its bytes once, the fewest of all algorithms, and the hub the most. So they are fast if the
others have slow uplinks, and the hub relays their connections to each other anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop, others
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class HubAllReduce(Collective):
    """Each rank sends its tensor to the hub, which adds it and sends the sum to each rank.

    one piece; round 0: to the hub; round 1: from the hub to all
    bytes:    N each other rank, N (n-1) the hub
    messages: 1 each other rank, n - 1 the hub, in 2 rounds
    source:   Li et al. 2014, OSDI (of a parameter server, which applies the sum itself)

    hub: rank of the hub, modulo the world.
    """

    name: ClassVar[str] = "hub"

    hub: int = 0

    def __post_init__(self) -> None:
        require(self.hub >= 0, f"hub must be a rank, 0 or more, got {self.hub}")

    def pieces(self, world: int) -> int:
        return 1

    def unlike(self, world: int) -> Sequence[int]:
        """Return the hub, and another rank."""
        hub = self.hub % world
        return hub, (hub + 1) % world

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        hub = self.hub % world
        if rank != hub:
            yield Hop(0, Does.SEND, hub, 0, 1)
            yield Hop(1, Does.KEEP, hub, 0, 1)
            return
        yield from (Hop(0, Does.ADD, peer, 0, 1) for peer in sorted(others(rank, world)))
        yield from (Hop(1, Does.SEND, peer, 0, 1) for peer in others(rank, world))


@dataclass(frozen=True, kw_only=True)
class HubAllGather(Collective):
    """Each rank sends its piece to the hub, which sends each rank the pieces of all others.

    n pieces, piece i of rank i; round 0: to the hub; round 1: from the hub to all
    bytes:    its own piece each other rank; n - 2 times the pieces of the others and n - 1 times its own, the hub
    messages: 1 each other rank, (n - 1)^2 the hub, in 2 rounds
    source:   as HubAllReduce

    hub: rank of the hub, modulo the world.
    """

    name: ClassVar[str] = "hub all-gather"

    hub: int = 0

    def pieces(self, world: int) -> int:
        return world

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        hub = self.hub % world
        if rank != hub:
            yield Hop(0, Does.SEND, hub, rank, rank + 1)
            yield from (Hop(1, Does.KEEP, hub, piece, piece + 1) for piece in sorted(others(rank, world)))
            return
        yield from (Hop(0, Does.KEEP, peer, peer, peer + 1) for peer in sorted(others(rank, world)))
        for piece in [rank, *others(rank, world)]:
            yield from (Hop(1, Does.SEND, peer, piece, piece + 1) for peer in others(rank, world) if peer != piece)


@dataclass(frozen=True, kw_only=True)
class HubBroadcast(Collective):
    """The source sends its bytes to the hub, which sends them to all other ranks.

    one piece; round 0: to the hub, unless it is the source; round 1: from the hub to the rest
    bytes:    N the source, N (n-2) the hub; N (n-1) the hub if it is the source
    messages: 1 the source, n - 2 the hub, in 2 rounds; in 1 if the hub is the source
    source:   as HubAllReduce

    source, hub: their ranks, modulo the world.
    """

    name: ClassVar[str] = "hub broadcast"

    source: int = 0
    hub: int = 0

    def pieces(self, world: int) -> int:
        return 1

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        source, hub = self.source % world, self.hub % world
        rest = [peer for peer in others(hub, world) if peer != source]
        if rank == source != hub:
            yield Hop(0, Does.SEND, hub, 0, 1)
        elif rank != hub:
            yield Hop(1, Does.KEEP, hub, 0, 1)
        else:
            if hub != source:
                yield Hop(0, Does.KEEP, source, 0, 1)
            yield from (Hop(1, Does.SEND, peer, 0, 1) for peer in rest)
