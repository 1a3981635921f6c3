"""FedProx: a proximal term keeps each device close to the round's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.base import FederatedStrategy, Memory
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class FedProx(FederatedStrategy):
    """FedAvg with a proximal term: each device minimizes its loss + mu/2 |w_k - w|^2.

    g <- g + mu (w_k - w), before each step of the device's optimizer: the gradient of its loss + mu/2 |w_k - w|^2
    law:    mu 0 is FedAvg, bit for bit; on a quadratic of curvature a, long training ends at (a b + mu w) / (a + mu),
            b its minimum
    bytes:  FedAvg's
    source: Li et al. 2020, MLSys

    Works with any optimizer. Other parts of its step, such as AdamW's weight decay, are added to the proximal term.

    Args:
        mu: coefficient of the proximal term, 0 or more, in units of the loss's curvature. Li et al. tune it over 0.001,
            0.01, 0.1 and 1.
        fraction: fraction of all clients that train in a round.
        local_steps, local_epochs, pull, aggregator, secure, privacy, stale_after: as for FedAvg.

    Example:
        >>> gossamer.FedProx(mu=0.01)
        FedProx(mu=0.01)
    """

    mu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mu >= 0,
            f"mu must be the coefficient of the proximal term, 0 or more, got {self.mu}. Write FedProx(mu=0.01), or "
            "another of 0.001, 0.01, 0.1 and 1.",
        )

    @property
    def changes_gradients(self) -> bool:
        return self.mu > 0

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        gradient.add_(parameters - anchor, alpha=self.mu)
