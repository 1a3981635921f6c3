"""Hierarchy: every rank exchanges within its node, and with its counterparts in adjacent nodes."""
# ruff: noqa: A002 -- `round` is the usual name

from __future__ import annotations

from dataclasses import dataclass, replace
from math import cos, pi, sin

from gossamer.algorithms.topologies.base import Crossing, Topology
from gossamer.base.term import Inelastic, Term
from gossamer.errors import require

TURNED = 1.1  # radians, so that in a picture no edge between nodes overlaps one inside a node


@dataclass(frozen=True, repr=False)
class Hierarchy(Topology):
    """Hierarchy: every rank exchanges with its whole node, and with its counterparts in the two adjacent nodes.

    rank = node per_node + place;  (node, place) sends to all (node, .), and (node - 1, place), (node + 1, place)
    law:   with full nodes |lambda_2| = 1 - 2 (1 - cos(2 pi / nodes)) / (per_node + 2), from 4 nodes on
    bytes: per_node - 1 messages a rank and round inside a node, 2 between nodes

    The last node may have fewer ranks; the ring of a place then skips it. Synchronous strategies average within nodes
    first. With `between`, only messages between nodes are compressed: see Hierarchical.

    Args:
        per_node: ranks per node.
        between: compressor of the messages between nodes; None: uncompressed.

    Example:
        >>> gossamer.Hierarchy(per_node=2).sends_to(0, world=6, round=0)
        (1, 2, 4)
    """

    per_node: int = 8
    between: Term | None = None

    def __post_init__(self) -> None:
        require(self.per_node >= 1, f"per_node must be a number of workers, 1 or more, got {self.per_node}")
        require(
            self.between is None or self.between.kind == "compressor",
            f"between must be a compressor of the messages between nodes, got {self.between!r}. Write "
            f"Hierarchy(per_node={self.per_node}, between=TopK(density=0.01)).",
        )

    @property
    def inelastic(self) -> Inelastic:
        return Inelastic("nodes would change with every worker that joins or leaves", "Leave out Hierarchy")

    @property
    def collective(self) -> str:
        return f"hierarchical({self.per_node})"

    @property
    def crossing(self) -> Crossing | None:
        return None if self.between is None else Crossing(self.between, self.per_node)

    @property
    def plain(self) -> Hierarchy:
        return replace(self, between=None)

    def sends_to(self, rank: int, world: int, round: int, seed: int = 0) -> tuple[int, ...]:
        node, place = divmod(rank, self.per_node)
        first = node * self.per_node
        inside = set(range(first, min(first + self.per_node, world)))
        nodes = len(range(place, world, self.per_node))  # that have this place
        between = {(node + step) % nodes * self.per_node + place for step in (-1, 1)}
        return tuple(sorted((inside | between) - {rank}))

    def place(self, rank: int, world: int) -> tuple[float, float]:
        """Return a position on a small circle per node; nodes are on a large circle."""
        node, place = divmod(rank, self.per_node)
        nodes = len(range(0, world, self.per_node))
        if nodes == 1:
            return super().place(rank, world)
        here, there = 2 * pi * place / self.per_node + TURNED, 2 * pi * node / nodes
        return 0.7 * sin(there) + 0.28 * sin(here), 0.7 * cos(there) + 0.28 * cos(here)


if __name__ == "__main__":
    from gossamer.algorithms.topologies.describe import draw

    draw(Hierarchy(per_node=4))
