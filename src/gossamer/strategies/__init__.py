"""When to talk."""

from gossamer.strategies.base import AGREED, AVERAGE, KEEP, RESET, Memory, Merging, Mixing, Stage, Strategy
from gossamer.strategies.delayed import DelayedAveraging
from gossamer.strategies.every_step import EveryStep
from gossamer.strategies.gossip import Gossip
from gossamer.strategies.local import LocalSGD, PostLocalSGD
from gossamer.strategies.outer import DiLoCo
from gossamer.strategies.schedule import Periodic, Turn
from gossamer.strategies.server import ParameterServer

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
