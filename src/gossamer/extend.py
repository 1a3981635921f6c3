"""Names for terms of your own: a compressor is a generator that yields operations and returns an AggregationResult.

CONTRIBUTING.md has an example, and `gossamer.register` makes the class known in recipe texts.
"""

from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import within_range
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced, InGroup, NeighborAllGather, Payload
from gossamer.errors import NotFinite, require

__all__ = [
    "Aggregation",
    "AggregationContext",
    "AggregationResult",
    "AllGather",
    "AllReduceMean",
    "AllToAll",
    "Coalesced",
    "FlatTensors",
    "InGroup",
    "Layout",
    "NeighborAllGather",
    "NotFinite",
    "Payload",
    "Slot",
    "State",
    "require",
    "within_range",
]
