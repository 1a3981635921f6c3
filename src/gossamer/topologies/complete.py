"""Everyone talks to everyone."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.topologies.base import Topology


@dataclass(frozen=True, repr=False)
class Complete(Topology):
    """Everyone talks to everyone; which collective carries it is the engine's choice."""

    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(world) if peer != rank)
