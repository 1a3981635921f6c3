"""Direct all-reduce: every piece directly to its owner, and its sum directly to all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop, others


@dataclass(frozen=True, kw_only=True)
class DirectAllReduce(Collective):
    """All ranks send piece j to rank j, which sums it and sends the sum to all ranks.

    n pieces; round 0: rank i sends piece j to each j; round 1: rank j sends piece j to all
    bytes:    2 N (n-1)/n a rank, over n - 1 links each way
    messages: 2 (n-1) a rank, in 2 rounds
    source:   Thakur, Rabenseifner & Gropp 2005, IJHPCA (as the pairwise algorithm)
    """

    name: ClassVar[str] = "direct"

    def pieces(self, world: int) -> int:
        return world

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        peers = others(rank, world)
        yield from (Hop(0, Does.SEND, peer, peer, peer + 1) for peer in peers)
        yield from (Hop(0, Does.ADD, peer, rank, rank + 1) for peer in sorted(peers))
        yield from (Hop(1, Does.SEND, peer, rank, rank + 1) for peer in peers)
        yield from (Hop(1, Does.KEEP, peer, peer, peer + 1) for peer in sorted(peers))
