"""Topologies: the graphs along which workers average, in integers only.

base          Topology: the peers of each rank in each round, their weights, and how fast they average
complete      Complete: all with all
ring          Ring
torus         Torus: a grid whose edges meet
exponential   Exponential: peers a power of two away, all at once or one a round
hierarchy     Hierarchy: nodes of workers, and counterparts in the nodes beside
random_peers  RandomPeers: drawn anew in every round
describe      a table of how fast a topology averages, and a picture of it
"""

from warnings import filterwarnings

from gossamer.algorithms.topologies.base import Topology
from gossamer.algorithms.topologies.complete import Complete
from gossamer.algorithms.topologies.exponential import Exponential
from gossamer.algorithms.topologies.hierarchy import Hierarchy
from gossamer.algorithms.topologies.random_peers import RandomPeers
from gossamer.algorithms.topologies.ring import Ring
from gossamer.algorithms.topologies.torus import Torus

# `python -m gossamer.algorithms.topologies.ring` runs a module that is imported already, which is fine here
filterwarnings("ignore", "'gossamer.algorithms.topologies.*found in sys.modules", RuntimeWarning)

__all__ = ["Complete", "Exponential", "Hierarchy", "RandomPeers", "Ring", "Topology", "Torus"]
