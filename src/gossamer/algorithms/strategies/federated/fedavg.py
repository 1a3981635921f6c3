"""FedAvg: the weighted mean of what devices learned from their own data."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.strategies.federated.base import FederatedStrategy


@dataclass(frozen=True, repr=False)
class FedAvg(FederatedStrategy):
    """Devices train on their own data; the server averages what they learned, by their numbers of samples.

    w <- w - sum over the cohort of (n_k / m) (w - w_k), m = sum over the cohort of n_k
    law:    one local step of SGD on every client is one step on their joined batch
    bytes:  a round and device: the compressor's message up; down 4 N, or the pull compressor's links since its version
    source: McMahan et al. 2017, AISTATS (and its erratum: m sums over the cohort, not over all)
    """

    fraction: float = 0.1  # of all clients that train in a round
