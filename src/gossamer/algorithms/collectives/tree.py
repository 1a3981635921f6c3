"""Tree all-reduce: sums pass up a tree, and the sum at its root passes down again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gossamer.algorithms.collectives.base import Collective, Does, Hop


@dataclass(frozen=True, kw_only=True)
class TreeAllReduce(Collective):
    """Each rank adds the tensors of its two children and passes the sum up; the root's sum passes down the same way.

    one piece; the children of rank i are 2 i + 1 and 2 i + 2; from depth d up in round D - d, down in D + d
    bytes:    N a leaf, 3 N a rank with a parent and two children, 2 N the root
    messages: 1 a leaf, 3 or 2 the others, in 2 D rounds; D = floor(log2 n)
    source:   Thakur, Rabenseifner & Gropp 2005, IJHPCA (of trees; theirs is binomial)

    Few messages, and few bytes for most ranks; the busiest rank sends more than in a ring.
    """

    name: ClassVar[str] = "tree"

    def pieces(self, world: int) -> int:
        return 1

    def unlike(self, world: int) -> Sequence[int]:
        """Return the root, and the first rank that may have a parent and two children."""
        return range(min(world, 2))

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        depth, deepest = _depth(rank), _depth(world - 1)
        children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world]
        parents = [(rank - 1) // 2] if rank else []
        yield from (Hop(deepest - depth - 1, Does.ADD, child, 0, 1) for child in children)
        yield from (Hop(deepest - depth, Does.SEND, parent, 0, 1) for parent in parents)
        yield from (Hop(deepest + depth - 1, Does.KEEP, parent, 0, 1) for parent in parents)
        yield from (Hop(deepest + depth, Does.SEND, child, 0, 1) for child in children)


def _depth(rank: int) -> int:
    return (rank + 1).bit_length() - 1
