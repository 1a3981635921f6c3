"""Topologies: the graphs along which workers average, in integers only.

base          Topology: the peers of each rank in each round, their weights, and the rate of averaging
complete      Complete: all pairs
ring          Ring
torus         Torus: a grid with wrap-around
exponential   Exponential: peers at power-of-two distances, all at once or one per round
hierarchy     Hierarchy: nodes of workers, and counterparts in adjacent nodes
random_peers  RandomPeers: random pairs in every round
groups        Groups: small groups that change in every round
describe      a table of a topology's rate of averaging, and a picture of it
"""

from warnings import filterwarnings

from gossamer.algorithms.topologies.base import Topology
from gossamer.algorithms.topologies.complete import Complete
from gossamer.algorithms.topologies.exponential import Exponential
from gossamer.algorithms.topologies.groups import Groups
from gossamer.algorithms.topologies.hierarchy import Hierarchy
from gossamer.algorithms.topologies.random_peers import RandomPeers
from gossamer.algorithms.topologies.ring import Ring
from gossamer.algorithms.topologies.torus import Torus

# `python -m gossamer.algorithms.topologies.ring` runs a module that is imported already, which is fine here
filterwarnings("ignore", "'gossamer.algorithms.topologies.*found in sys.modules", RuntimeWarning)

__all__ = ["Complete", "Exponential", "Groups", "Hierarchy", "RandomPeers", "Ring", "Topology", "Torus"]
