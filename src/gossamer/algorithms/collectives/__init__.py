"""All-reduce and broadcast algorithms as tables of hops: the pieces that each rank sends, to which rank, in order.

base              Collective, Hop and Does: the format of a table
ring              RingAllReduce
halving_doubling  HalvingDoubling: recursive halving, then doubling
tree              TreeAllReduce
direct            DirectAllReduce: each piece directly to its owner and back
hierarchical      HierarchicalAllReduce: within nodes, between them, within them
hub               HubAllReduce, HubAllGather, HubBroadcast: by one rank, which sums or copies for all
broadcast         Broadcast: scatter, then all-gather
"""

from collections.abc import Callable, Mapping

from gossamer.algorithms.collectives.base import Collective, Does, Hop, Table, bounds, others
from gossamer.algorithms.collectives.broadcast import Broadcast
from gossamer.algorithms.collectives.direct import DirectAllReduce
from gossamer.algorithms.collectives.halving_doubling import HalvingDoubling
from gossamer.algorithms.collectives.hierarchical import HierarchicalAllReduce
from gossamer.algorithms.collectives.hub import HubAllGather, HubAllReduce, HubBroadcast
from gossamer.algorithms.collectives.ring import RingAllReduce
from gossamer.algorithms.collectives.tree import TreeAllReduce

COLLECTIVES: Mapping[str, Callable[..., Collective]] = {
    each.name: each
    for each in (
        RingAllReduce,
        HalvingDoubling,
        TreeAllReduce,
        DirectAllReduce,
        HierarchicalAllReduce,
        HubAllReduce,
    )
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
    "HubAllGather",
    "HubAllReduce",
    "HubBroadcast",
    "RingAllReduce",
    "Table",
    "TreeAllReduce",
    "bounds",
    "others",
]
