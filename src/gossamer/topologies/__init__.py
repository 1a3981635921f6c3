"""Who talks to whom."""

from gossamer.topologies.base import Topology
from gossamer.topologies.complete import Complete

__all__ = ["Complete", "Topology"]
