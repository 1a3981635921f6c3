"""FedBuff: a version for every so many contributions, from whatever version each began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated.base import CohortSummary, FederatedStrategy, LocalWork, Memory
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class FedBuff(FederatedStrategy):
    """Nobody is waited for: devices report when they are done, and every `buffer` reports make a version.

    w <- w - server_learning_rate / buffer  sum over the buffer of s_k (w_k's version - w_k),  s_k = 1 / sqrt(1 + age)
    law:    contributions of age 0 are FedAvg's of clients with equal samples; a buffer of contributions that are all
            of age 3 makes half the step
    bytes:  FedAvg's, by device; a version costs `buffer` messages
    source: Nguyen et al. 2022, AISTATS

    age: versions made since the one that a device began from. All devices weigh alike but for their age, as in the
    paper: the sum is divided by how many there are, not by their weights, so that old ones make shorter steps.
    """

    buffer: int = 10  # contributions of a version
    staleness: int | None = None  # oldest age that still counts; None: any
    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.buffer >= 1, f"buffer counts contributions, 1 or more, not {self.buffer}: write FedBuff(buffer=9)")
        require(
            self.staleness is None or self.staleness >= 0,
            f"staleness is a number of versions, 0 or more, not {self.staleness}: write FedBuff(staleness=20)",
        )
        require(
            self.server_learning_rate > 0,
            f"server_learning_rate is above 0, not {self.server_learning_rate}: write FedBuff()",
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
