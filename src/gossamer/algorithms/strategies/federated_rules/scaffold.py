"""SCAFFOLD: control variates correct local steps for the difference between local and global gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, LocalWork, Memory
from gossamer.errors import require

VARIATE = "variate"


@dataclass(frozen=True, repr=False)
class SCAFFOLD(FederatedStrategy):
    """FedAvg with control variates, which correct local steps for the client drift of heterogeneous data.

    g <- g - c_k + c, before each of K steps of learning rate h;  c_k <- c_k - c + (w - w_k) / (K h)  (option II)
    w <- w - server_learning_rate mean over the cohort of (w - w_k)
    c <- c + |cohort| / clients  mean over the cohort of the changes of c_k
    law:    c is the mean of all clients' c_k after every round, for any cohort; where all c_k are equal it is FedAvg
    bytes:  twice FedAvg's, both ways; memory: N on each device, N on the server
    source: Karimireddy et al. 2020, ICML (algorithm 1)

    The paper calls c and c_k (c_i there) control variates, h eta_l and server_learning_rate eta_g. All contributions
    have equal weights, as in the paper. Devices train by SGD without momentum and with one learning rate for all
    parameters, which may change from step to step: otherwise (w - w_k) / (K h) is not a mean of gradients. The error of
    a lossy compressor remains in the residual, and the law then includes it.

    Args:
        server_learning_rate: factor of the mean pseudo-gradient.
        fraction: fraction of all clients that train in a round.
        local_steps, local_epochs, pull, aggregator, secure, privacy, stale_after: as for FedAvg.

    Example:
        >>> gossamer.SCAFFOLD(local_steps=20)
        SCAFFOLD(local_steps=20)
    """

    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.server_learning_rate > 0,
            f"server_learning_rate must be above 0, got {self.server_learning_rate}. Write SCAFFOLD().",
        )

    @property
    def memory_keys(self) -> Sequence[str]:
        return (VARIATE,)

    @property
    def shared_keys(self) -> Sequence[str]:
        return (VARIATE,)

    @property
    def changes_gradients(self) -> bool:
        return True

    @property
    def why_plain_sgd(self) -> str | None:
        return "SCAFFOLD computes a device's mean gradient from its update, steps and learning rate"

    @property
    def uses_learning_rate(self) -> bool:
        return True

    @property
    def contribution_count(self) -> int:
        return 2

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        gradient.add_(shared[VARIATE]).sub_(memory[VARIATE])

    def contribute(
        self, pseudo_gradient: Tensor, work: LocalWork, shared: Memory, memory: Memory
    ) -> tuple[tuple[Tensor, ...], Memory]:
        way = work.steps * work.learning_rate
        if way == 0:  # without a step there is no gradient
            return (pseudo_gradient, torch.zeros_like(pseudo_gradient)), memory
        change = pseudo_gradient / way - shared[VARIATE]
        return (pseudo_gradient, change), {VARIATE: memory[VARIATE] + change}

    def weight(self, work: LocalWork, staleness: int) -> float:
        return 1.0

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        pseudo_gradient, change = means
        parameters.sub_(pseudo_gradient, alpha=self.server_learning_rate)
        memory[VARIATE].add_(change, alpha=cohort.contributions / cohort.clients)
