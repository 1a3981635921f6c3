"""FedAvg: the mean of the devices' updates, weighted by their numbers of samples."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.strategies.federated_rules.base import FederatedStrategy


@dataclass(frozen=True, repr=False)
class FedAvg(FederatedStrategy):
    """Federated averaging: devices train on their own data, and the server averages their updates weighted by samples.

    w <- w - sum over the cohort of (n_k / m) (w - w_k), m = sum over the cohort of n_k
    law:    one local step of SGD on every client is one step on their joined batch
    bytes:  a round and device: the compressor's message up; down 4 N, or the pull compressor's differences since its
            version
    source: McMahan et al. 2017, AISTATS (and its erratum: m sums over the cohort, not over all)

    The paper calls `fraction` C, local_epochs E, and the local batch size B, which the script chooses.

    Args:
        fraction: fraction of all clients that train in a round, in (0, 1].
        local_steps: optimizer steps per device and round.
        local_epochs: passes over the device's data per round, without local_steps; default 1.
        pull: compressor of the differences between versions that devices download; None: uncompressed parameters.
        aggregator: combines the contributions of a cohort: WeightedMean, Median, TrimmedMean or MultiKrum.
        secure: SecureAggregation, or None.
        privacy: CentralPrivacy, LocalPrivacy, DistributedPrivacy, or None.
        stale_after: versions after which a device's residual is dropped; None: never.

    Example:
        >>> gossamer.FedAvg(fraction=0.05, local_steps=20) + gossamer.TopK(density=0.01)
        FedAvg(fraction=0.05, local_steps=20) + TopK(density=0.01)
    """

    fraction: float = 0.1
