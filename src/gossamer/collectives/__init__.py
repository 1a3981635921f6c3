"""Sums over all ranks, and what one tells all, as tables of hops: who sends which pieces to whom, in which order."""

from collections.abc import Callable, Mapping

from gossamer.collectives.base import Collective, Does, Hop, Table, bounds, others
from gossamer.collectives.broadcast import Broadcast
from gossamer.collectives.direct import Direct
from gossamer.collectives.halving_doubling import HalvingDoubling
from gossamer.collectives.hierarchical import Hierarchical
from gossamer.collectives.ring import Ring
from gossamer.collectives.tree import Tree

COLLECTIVES: Mapping[str, Callable[..., Collective]] = {
    each.name: each for each in (Ring, HalvingDoubling, Tree, Direct, Hierarchical)
}

__all__ = [
    "COLLECTIVES",
    "Broadcast",
    "Collective",
    "Direct",
    "Does",
    "HalvingDoubling",
    "Hierarchical",
    "Hop",
    "Ring",
    "Table",
    "Tree",
    "bounds",
    "others",
]
