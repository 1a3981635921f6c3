"""Sums over all ranks, and what one tells all, as tables of hops: who sends which pieces to whom, in which order."""

from collections.abc import Callable, Mapping

from gossamer.collectives.base import Collective, Does, Hop, Table, bounds, others
from gossamer.collectives.broadcast import Broadcast
from gossamer.collectives.direct import DirectAllReduce
from gossamer.collectives.halving_doubling import HalvingDoubling
from gossamer.collectives.hierarchical import HierarchicalAllReduce
from gossamer.collectives.ring import RingAllReduce
from gossamer.collectives.tree import TreeAllReduce

COLLECTIVES: Mapping[str, Callable[..., Collective]] = {
    each.name: each for each in (RingAllReduce, HalvingDoubling, TreeAllReduce, DirectAllReduce, HierarchicalAllReduce)
}

__all__ = [
    "COLLECTIVES",
    "Broadcast",
    "Collective",
    "DirectAllReduce",
    "Does",
    "HalvingDoubling",
    "HierarchicalAllReduce",
    "Hop",
    "RingAllReduce",
    "Table",
    "TreeAllReduce",
    "bounds",
    "others",
]
