"""FedBuff: asynchronous rounds with a buffer of contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, LocalWork, Memory
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class FedBuff(FederatedStrategy):
    """Buffered asynchronous aggregation: devices report at any time, and every `buffer` reports make a version.

    w <- w - server_learning_rate / buffer  sum over the buffer of s_k (w_k's version - w_k),  s_k = 1 / sqrt(1 + age)
    law:    contributions of age 0 are FedAvg's of clients with equal samples; a buffer of contributions that are all
            of age 3 makes half the step
    bytes:  FedAvg's, by device; a version costs `buffer` messages
    source: Nguyen et al. 2022, AISTATS

    The paper calls `buffer` K, server_learning_rate eta_g, and the age staleness tau: the versions made since the one
    that a device started from. Weights depend on the age only, as in the paper: the sum is divided by the number of
    contributions and not by their weights, so that old ones make smaller steps.

    Args:
        buffer: contributions per version.
        staleness: largest age that is used, in versions; None: no limit.
        server_learning_rate: factor of the mean pseudo-gradient.
        fraction: fraction of all clients that train at a time.
        local_steps, local_epochs, pull, aggregator, secure, privacy, stale_after: as for FedAvg.

    Example:
        >>> gossamer.FedBuff(buffer=20, staleness=50)
        FedBuff(buffer=20, staleness=50)
    """

    buffer: int = 10
    staleness: int | None = None
    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.buffer >= 1,
            f"buffer must be a number of contributions, 1 or more, got {self.buffer}. Write FedBuff(buffer=10).",
        )
        require(
            self.staleness is None or self.staleness >= 0,
            f"staleness must be a number of versions, 0 or more, got {self.staleness}. Write FedBuff(staleness=20).",
        )
        require(
            self.server_learning_rate > 0,
            f"server_learning_rate must be above 0, got {self.server_learning_rate}. Write FedBuff().",
        )

    @property
    def asynchronous(self) -> bool:
        return True

    def contributions_per_version(self, clients: int) -> int:
        return self.buffer

    @property
    def oldest_staleness(self) -> int | None:
        return self.staleness

    def weight(self, work: LocalWork, staleness: int) -> float:
        return float((1 + staleness) ** -0.5)

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        parameters.sub_(means[0], alpha=self.server_learning_rate * cohort.mean_weight)
