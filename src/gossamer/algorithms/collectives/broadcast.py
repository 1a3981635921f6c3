"""Broadcast: the source scatters its pieces, and the others all-gather them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop


@dataclass(frozen=True, kw_only=True)
class Broadcast(Collective):
    """Broadcast by scatter and all-gather: each other rank receives a part from `source` and passes it to the rest.

    n - 1 pieces; round 0: the source sends piece p to the p-th of the other ranks after it; round 1: that rank sends it
                  to the rest
    bytes:    N from the source, N (n-2)/(n-1) from each other rank; so it takes little longer than one copy on the
              source's line, where a tree of whole copies takes log2 n of them
    messages: n - 1 from the source, n - 2 from each other rank, in 2 rounds
    source:   Barnett, Gupta, Payne, Shuler, van de Geijn & Watts 1994, SHPCC (scatter, then collect)
    """

    name: ClassVar[str] = "broadcast"

    source: int = 0

    def pieces(self, world: int) -> int:
        return max(1, world - 1)

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        source = self.source % world
        piece_of = {(source + step) % world: step - 1 for step in range(1, world)}
        if rank == source:
            yield from (Hop(0, Does.SEND, peer, piece, piece + 1) for peer, piece in piece_of.items())
            return
        own = piece_of[rank]
        rest = [peer for peer in piece_of if peer != rank]
        yield Hop(0, Does.KEEP, source, own, own + 1)
        yield from (Hop(1, Does.SEND, peer, own, own + 1) for peer in rest[own:] + rest[:own])
        yield from (Hop(1, Does.KEEP, peer, piece_of[peer], piece_of[peer] + 1) for peer in sorted(rest))
