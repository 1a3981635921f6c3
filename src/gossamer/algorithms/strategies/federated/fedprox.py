"""FedProx: a spring draws each device to the round's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.federated.base import FederatedStrategy, Memory
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class FedProx(FederatedStrategy):
    """FedAvg whose devices do not run far: a spring draws each to the round's parameters.

    g <- g + mu (w_k - w), before each step of the device's optimizer: the gradient of its loss + mu/2 |w_k - w|^2
    law:    mu 0 is FedAvg, bit for bit; on a quadratic of curvature a, long training ends at (a b + mu w) / (a + mu),
            b its minimum
    bytes:  FedAvg's
    source: Li et al. 2020, MLSys

    Any optimizer will do. What it does by itself, such as AdamW's decay, comes beside the spring.
    """

    mu: float  # the spring's stiffness, in units of the loss's curvature

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mu >= 0, f"mu is how stiff the spring is, 0 or more, not {self.mu}: write FedProx(mu=0.01)")

    @property
    def changes_gradients(self) -> bool:
        return self.mu > 0

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        gradient.add_(parameters - anchor, alpha=self.mu)
