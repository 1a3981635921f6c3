"""What a topology is: who talks to whom, in integers only."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.terms import Term


class Topology(Term, ABC):
    """Who talks to whom."""

    kind = "topology"

    @abstractmethod
    def peers(self, rank: int, world: int) -> tuple[int, ...]:
        """The ranks that `rank` of `world` talks to, ascending, itself left out."""
