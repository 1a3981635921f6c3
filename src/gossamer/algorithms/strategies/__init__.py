"""Strategies: when workers synchronize, and whether they average gradients, parameters, or neither.

base               Strategy, its families, and the stages of a training: gradient, averaging, gossip, server
moment_rounds      the rounds in which an optimizer's moments are averaged
schedule           tables of sync rounds: when a fragment is sent and its mean applied
every_step         EveryStep: synchronous data parallelism, accumulated or delayed
global_batch       the passes of each worker for a step of a fixed number of samples
shares_by_speed    the same in proportion to the workers' speeds
forms_by_speed     the part of the workers' speeds that a strategy uses, and strategies that use more
local_sgd          LocalSGD, PostLocalSGD
diloco             DiLoCo, Streaming DiLoCo, the radial-directional mean
delayed_averaging  DelayedAveraging (DGA)
gossip             Gossip: symmetric, push-sum or pairwise (AD-PSGD)
noloco             NoLoCo: an outer optimizer over gossip
silent             Silent: no communication, the baseline of measurements
parameter_server   ParameterServer: synchronous, asynchronous or stale-synchronous
async_diloco       AsyncDiLoCo: local steps, and an outer optimizer on servers that waits for no worker
federated_rules    rounds of a server and devices that hold their own data
"""

from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.algorithms.strategies.base import (
    AGREED,
    FROM,
    AveragingStage,
    AveragingStrategy,
    FederatedStage,
    GossipStage,
    GossipStrategy,
    GradientStage,
    LocalServerStage,
    Memory,
    ServerStage,
    ServerStrategy,
    SilentStage,
    Stage,
    Strategy,
)
from gossamer.algorithms.strategies.delayed_averaging import DelayedAveraging
from gossamer.algorithms.strategies.diloco import DiLoCo
from gossamer.algorithms.strategies.every_step import EveryStep
from gossamer.algorithms.strategies.federated_rules import (
    SCAFFOLD,
    CentralPrivacy,
    DistributedPrivacy,
    FedAvg,
    FedBuff,
    FedNova,
    FedOpt,
    FedProx,
    LocalPrivacy,
)
from gossamer.algorithms.strategies.gossip import Gossip
from gossamer.algorithms.strategies.local_sgd import LocalSGD, PostLocalSGD
from gossamer.algorithms.strategies.moment_rounds import ALIGN, AVERAGE, KEEP, NEVER, RESET, MomentRounds
from gossamer.algorithms.strategies.noloco import NoLoCo
from gossamer.algorithms.strategies.parameter_server import ParameterServer
from gossamer.algorithms.strategies.schedule import PeriodicSchedule, SyncRound
from gossamer.algorithms.strategies.silent import Silent

__all__ = [
    "AGREED",
    "ALIGN",
    "AVERAGE",
    "FROM",
    "KEEP",
    "NEVER",
    "RESET",
    "SCAFFOLD",
    "AsyncDiLoCo",
    "AveragingStage",
    "AveragingStrategy",
    "CentralPrivacy",
    "DelayedAveraging",
    "DiLoCo",
    "DistributedPrivacy",
    "EveryStep",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FederatedStage",
    "Gossip",
    "GossipStage",
    "GossipStrategy",
    "GradientStage",
    "LocalPrivacy",
    "LocalSGD",
    "LocalServerStage",
    "Memory",
    "MomentRounds",
    "NoLoCo",
    "ParameterServer",
    "PeriodicSchedule",
    "PostLocalSGD",
    "ServerStage",
    "ServerStrategy",
    "Silent",
    "SilentStage",
    "Stage",
    "Strategy",
    "SyncRound",
]
