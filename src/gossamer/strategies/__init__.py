"""When to talk."""

from gossamer.strategies.base import (
    AGREED,
    AVERAGE,
    KEEP,
    RESET,
    AveragingStage,
    AveragingStrategy,
    GossipStage,
    GossipStrategy,
    GradientStage,
    Memory,
    ServerStage,
    ServerStrategy,
    Stage,
    Strategy,
)
from gossamer.strategies.delayed_averaging import DelayedAveraging
from gossamer.strategies.diloco import DiLoCo
from gossamer.strategies.every_step import EveryStep
from gossamer.strategies.gossip import Gossip
from gossamer.strategies.local_sgd import LocalSGD, PostLocalSGD
from gossamer.strategies.parameter_server import ParameterServer
from gossamer.strategies.schedule import PeriodicSchedule, SyncRound

__all__ = [
    "AGREED",
    "AVERAGE",
    "KEEP",
    "RESET",
    "AveragingStage",
    "AveragingStrategy",
    "DelayedAveraging",
    "DiLoCo",
    "EveryStep",
    "Gossip",
    "GossipStage",
    "GossipStrategy",
    "GradientStage",
    "LocalSGD",
    "Memory",
    "ParameterServer",
    "PeriodicSchedule",
    "PostLocalSGD",
    "ServerStage",
    "ServerStrategy",
    "Stage",
    "Strategy",
    "SyncRound",
]
