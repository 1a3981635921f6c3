"""All-reduce and broadcast algorithms as tables of hops: which rank sends which pieces to which, in which order.

base              Collective, Hop and Does: what a table says
ring              RingAllReduce
halving_doubling  HalvingDoubling: recursive halving, then doubling
tree              TreeAllReduce
direct            DirectAllReduce: each piece straight to its owner and back
hierarchical      HierarchicalAllReduce: within nodes, between them, within them
broadcast         Broadcast: scatter, then all-gather
"""

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
