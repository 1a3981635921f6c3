"""Federated strategies: which devices train in a round, what each sends, and what the server makes of it.

base        FederatedStrategy: a round as pure rules on flat tensors, on the device and on the server
combinations  what among a federation's compressors would make no sense
fedavg      FedAvg: the weighted mean of what devices learned
fedprox     FedProx: a spring draws devices to the round's parameters
scaffold    SCAFFOLD: control variates against unlike data
fednova     FedNova: directions are averaged, whatever the number of steps
fedopt      FedOpt: Adam, Yogi, Adagrad or any of torch's optimizers on the server
server_optimizer  torch's optimizers on flat parameters
fedbuff     FedBuff: asynchronous, a version for every so many contributions
aggregator  Aggregator, WeightedMean: how a cohort's contributions become one
robust      Median, TrimmedMean, MultiKrum: aggregators that outliers do not move far
secure_aggregation  SecureAggregation: the server learns the sum only
privacy     Privacy: what versions tell of any one device is bounded: central, local, distributed
"""

from gossamer.algorithms.strategies.federated.aggregator import Aggregator, WeightedMean
from gossamer.algorithms.strategies.federated.base import CohortSummary, FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated.fedavg import FedAvg
from gossamer.algorithms.strategies.federated.fedbuff import FedBuff
from gossamer.algorithms.strategies.federated.fednova import FedNova
from gossamer.algorithms.strategies.federated.fedopt import FedOpt
from gossamer.algorithms.strategies.federated.fedprox import FedProx
from gossamer.algorithms.strategies.federated.privacy.terms import (
    CentralPrivacy,
    DistributedPrivacy,
    LocalPrivacy,
    Privacy,
)
from gossamer.algorithms.strategies.federated.robust import Median, MultiKrum, TrimmedMean
from gossamer.algorithms.strategies.federated.scaffold import SCAFFOLD
from gossamer.algorithms.strategies.federated.secure_aggregation import SecureAggregation

__all__ = [
    "SCAFFOLD",
    "Aggregator",
    "CentralPrivacy",
    "CohortSummary",
    "DistributedPrivacy",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FederatedStrategy",
    "LocalPrivacy",
    "LocalWork",
    "Median",
    "MultiKrum",
    "Privacy",
    "SecureAggregation",
    "TrimmedMean",
    "WeightedMean",
]
