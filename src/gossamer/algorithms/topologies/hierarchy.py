"""Hierarchy: every rank exchanges within its node, and with its counterparts in the nodes beside it."""
# ruff: noqa: A002 -- a round is the usual name

from __future__ import annotations

from dataclasses import dataclass, replace
from math import cos, pi, sin

from gossamer.algorithms.topologies.base import Crossing, Topology
from gossamer.base.term import Term
from gossamer.errors import require

TURNED = 1.1  # radians, so that in a picture no edge between nodes runs along one inside a node


@dataclass(frozen=True, repr=False)
class Hierarchy(Topology):
    """Everyone talks to all of its node, and to the one in its place in the two nodes beside it.

    rank = node per_node + place;  (node, place) tells all (node, .), and (node - 1, place), (node + 1, place)
    law:   with full nodes |lambda_2| = 1 - 2 (1 - cos(2 pi / nodes)) / (per_node + 2), from 4 nodes on
    bytes: per_node - 1 messages a rank and round inside a node, 2 between nodes

    per_node: in ranks. The last node may have fewer; the ring of a place then passes it by. In lock step, means are
    taken within nodes first, and between: a compressor, of what then travels between the nodes alone.
    """

    per_node: int = 8
    between: Term | None = None

    def __post_init__(self) -> None:
        require(self.per_node >= 1, f"per_node is a number of workers, 1 or more, not {self.per_node}")
        require(
            self.between is None or self.between.kind == "compressor",
            f"between is a compressor, of what travels between nodes, not {self.between!r}. Write "
            f"Hierarchy(per_node={self.per_node}, between=TopK(density=0.01)).",
        )

    @property
    def collective(self) -> str:
        return f"hierarchical({self.per_node})"

    @property
    def crossing(self) -> Crossing | None:
        return None if self.between is None else Crossing(self.between, self.per_node)

    @property
    def plain(self) -> Hierarchy:
        return replace(self, between=None)

    def tells(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        node, place = divmod(rank, self.per_node)
        first = node * self.per_node
        inside = set(range(first, min(first + self.per_node, world)))
        nodes = len(range(place, world, self.per_node))  # that have this place
        between = {(node + step) % nodes * self.per_node + place for step in (-1, 1)}
        return tuple(sorted((inside | between) - {rank}))

    def place(self, rank: int, world: int) -> tuple[float, float]:
        """Nodes on a large circle, ranks of a node on a small one."""
        node, place = divmod(rank, self.per_node)
        nodes = len(range(0, world, self.per_node))
        if nodes == 1:
            return super().place(rank, world)
        here, there = 2 * pi * place / self.per_node + TURNED, 2 * pi * node / nodes
        return 0.7 * sin(there) + 0.28 * sin(here), 0.7 * cos(there) + 0.28 * cos(here)


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Hierarchy(per_node=4))
