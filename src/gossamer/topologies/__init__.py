"""Who talks to whom."""

from warnings import filterwarnings

from gossamer.topologies.base import Topology
from gossamer.topologies.complete import Complete
from gossamer.topologies.exponential import Exponential
from gossamer.topologies.hierarchy import Hierarchy
from gossamer.topologies.random_peers import RandomPeers
from gossamer.topologies.ring import Ring
from gossamer.topologies.torus import Torus

# `python -m gossamer.topologies.ring` runs a module that is imported already, which is fine here
filterwarnings("ignore", "'gossamer.topologies.*found in sys.modules", RuntimeWarning)

__all__ = ["Complete", "Exponential", "Hierarchy", "RandomPeers", "Ring", "Topology", "Torus"]
