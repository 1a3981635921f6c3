"""Hierarchical all-reduce: sum within every node, then between the nodes, then share within the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop, others
from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllReduce(Collective):
    """Each rank sums a part of its node's tensors; ranks with the same part sum it between the nodes, directly.

    m nodes of s ranks: s parts of m pieces each. Round 0: part p to the rank of the node that holds it; round 1: its
    piece k to the holder in node k, its owner; round 2: back to the holders; round 3: part p to all of the node
    bytes:    2 N (s-1)/s inside its node and 2 N (m-1)/(m s) between nodes a rank; so 2 N (m-1)/m a node
    messages: 2 (s-1) inside and 2 (m-1) between nodes a rank, in 4 rounds; without 1 and 2 for a single node
    source:   Jia et al. 2018, arXiv:1807.11205 (of the levels; theirs use rings)

    per_node: number of consecutive ranks per node. The last node may have fewer, q: its place i then holds the parts i,
    i + q, i + 2 q, ..., each of which has a holder in a full node.
    """

    name: ClassVar[str] = "hierarchical"
    per_node: int

    def __post_init__(self) -> None:
        require(self.per_node >= 1, f"per_node must be a number of workers, 1 or more, got {self.per_node}")

    def pieces(self, world: int) -> int:
        nodes = self._nodes(world)
        return nodes.parts * nodes.count

    def unlike(self, world: int) -> Sequence[int]:
        """Return the first rank of a full node and of the last one, which holds more parts if that node is smaller."""
        nodes = self._nodes(world)
        return 0, (nodes.count - 1) * nodes.parts

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        nodes = self._nodes(world)
        node, others_of_node, own = rank // nodes.parts, nodes.others_of_node(rank), nodes.held(rank)
        away = [(part, other) for other in others(node, nodes.count) for part in own]
        inside = [(peer, part) for peer in sorted(others_of_node) for part in nodes.held(peer)]
        yield from (Hop(0, Does.SEND, peer, *nodes.part(part)) for peer in others_of_node for part in nodes.held(peer))
        yield from (Hop(0, Does.ADD, peer, *nodes.part(part)) for peer in sorted(others_of_node) for part in own)
        yield from (Hop(1, Does.SEND, nodes.holder(other, part), *nodes.piece(part, other)) for part, other in away)
        yield from (
            Hop(1, Does.ADD, nodes.holder(other, part), *nodes.piece(part, node)) for part, other in sorted(away)
        )
        yield from (Hop(2, Does.SEND, nodes.holder(other, part), *nodes.piece(part, node)) for part, other in away)
        yield from (
            Hop(2, Does.KEEP, nodes.holder(other, part), *nodes.piece(part, other)) for part, other in sorted(away)
        )
        yield from (Hop(3, Does.SEND, peer, *nodes.part(part)) for peer in others_of_node for part in own)
        yield from (Hop(3, Does.KEEP, peer, *nodes.part(part)) for peer, part in inside)

    def _nodes(self, world: int) -> _Nodes:
        return _Nodes(world, min(self.per_node, world))


@dataclass(frozen=True)
class _Nodes:
    """Ranks in nodes of `parts` ranks; the last one may be smaller."""

    world: int
    parts: int

    @property
    def count(self) -> int:
        return -(-self.world // self.parts)

    def size(self, node: int) -> int:
        return min(self.parts, self.world - node * self.parts)

    def holder(self, node: int, part: int) -> int:
        return node * self.parts + part % self.size(node)

    def held(self, rank: int) -> range:
        node, place = divmod(rank, self.parts)
        return range(place, self.parts, self.size(node))

    def others_of_node(self, rank: int) -> list[int]:
        """Return the other ranks of its node, starting after `rank`."""
        node, place = divmod(rank, self.parts)
        return [node * self.parts + other for other in others(place, self.size(node))]

    def part(self, part: int) -> tuple[int, int]:
        """Return the range of a part's pieces."""
        return part * self.count, (part + 1) * self.count

    def piece(self, part: int, node: int) -> tuple[int, int]:
        """Return the range of the piece of `part` that `node` owns."""
        return part * self.count + node, part * self.count + node + 1
