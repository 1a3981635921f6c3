"""When to talk."""

from gossamer.strategies.base import AGREED, AVERAGE, KEEP, RESET, Memory, Merging, Mixing, Stage, Strategy
from gossamer.strategies.delayed_averaging import DelayedAveraging
from gossamer.strategies.diloco import DiLoCo
from gossamer.strategies.every_step import EveryStep
from gossamer.strategies.gossip import Gossip
from gossamer.strategies.local_sgd import LocalSGD, PostLocalSGD
from gossamer.strategies.parameter_server import ParameterServer
from gossamer.strategies.schedule import Periodic, Turn

__all__ = [
    "AGREED",
    "AVERAGE",
    "KEEP",
    "RESET",
    "DelayedAveraging",
    "DiLoCo",
    "EveryStep",
    "Gossip",
    "LocalSGD",
    "Memory",
    "Merging",
    "Mixing",
    "ParameterServer",
    "Periodic",
    "PostLocalSGD",
    "Stage",
    "Strategy",
    "Turn",
]
