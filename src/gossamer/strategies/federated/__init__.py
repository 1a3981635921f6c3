"""Federated strategies: which devices train in a round, what each sends, and what the server makes of it.

base        FederatedStrategy: a round as pure rules on flat tensors, on the device and on the server
fedavg      FedAvg: the weighted mean of what devices learned
aggregator  Aggregator, WeightedMean: how a cohort's contributions become one
secure_aggregation  SecureAggregation: the server learns the sum only
privacy     Privacy: what versions tell of any one device is bounded: central, local, distributed
privacy_loss  epsilon after so many rounds
integer_grid  how finely numbers are rounded under distributed privacy
"""

from gossamer.strategies.federated.aggregator import Aggregator, WeightedMean
from gossamer.strategies.federated.base import CohortSummary, FederatedStrategy, LocalWork
from gossamer.strategies.federated.fedavg import FedAvg
from gossamer.strategies.federated.privacy import CentralPrivacy, DistributedPrivacy, LocalPrivacy, Privacy
from gossamer.strategies.federated.secure_aggregation import SecureAggregation

__all__ = [
    "Aggregator",
    "CentralPrivacy",
    "CohortSummary",
    "DistributedPrivacy",
    "FedAvg",
    "FederatedStrategy",
    "LocalPrivacy",
    "LocalWork",
    "Privacy",
    "SecureAggregation",
    "WeightedMean",
]
