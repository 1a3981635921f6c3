"""Federated strategies: the devices of a round, their contributions, and the server's update.

base        FederatedStrategy: a round as pure rules on flat tensors, on the device and on the server
fedavg      FedAvg: the weighted mean of the devices' updates
fedprox     FedProx: a proximal term keeps devices close to the round's parameters
scaffold    SCAFFOLD: control variates for heterogeneous data
fednova     FedNova: updates normalized by their number of steps
fedopt      FedOpt: Adam, Yogi, Adagrad or any of torch's optimizers on the server
fedbuff     FedBuff: asynchronous, one version per `buffer` contributions
aggregator  Aggregator, WeightedMean: combine a cohort's contributions
robust      Median, TrimmedMean, MultiKrum: aggregators that are robust to outliers
secure_aggregation  SecureAggregation: the server learns the sum only
privacy     Privacy: user-level differential privacy: central, local, distributed
"""

from gossamer.algorithms.strategies.federated_rules.aggregator import Aggregator, WeightedMean
from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated_rules.fedavg import FedAvg
from gossamer.algorithms.strategies.federated_rules.fedbuff import FedBuff
from gossamer.algorithms.strategies.federated_rules.fednova import FedNova
from gossamer.algorithms.strategies.federated_rules.fedopt import FedOpt
from gossamer.algorithms.strategies.federated_rules.fedprox import FedProx
from gossamer.algorithms.strategies.federated_rules.privacy.terms import (
    CentralPrivacy,
    DistributedPrivacy,
    LocalPrivacy,
    Privacy,
)
from gossamer.algorithms.strategies.federated_rules.robust import Median, MultiKrum, TrimmedMean
from gossamer.algorithms.strategies.federated_rules.scaffold import SCAFFOLD
from gossamer.algorithms.strategies.federated_rules.secure_aggregation import SecureAggregation

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
