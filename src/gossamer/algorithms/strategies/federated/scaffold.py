"""SCAFFOLD: control variates take out of each step by how much a device's gradients differ from everyone's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated.base import CohortSummary, FederatedStrategy, LocalWork, Memory
from gossamer.errors import require

VARIATE = "variate"


@dataclass(frozen=True, repr=False)
class SCAFFOLD(FederatedStrategy):
    """Devices correct their steps by how their gradients differed from everyone's, so that unlike data pull no longer.

    g <- g - c_k + c, before each of K steps of learning rate h;  c_k <- c_k - c + (w - w_k) / (K h)  (option II)
    w <- w - server_learning_rate mean over the cohort of (w - w_k)
    c <- c + |cohort| / clients  mean over the cohort of what its c_k changed by
    law:    c is the mean of all clients' c_k after every round, whoever took part; where all c_k are equal it is FedAvg
    bytes:  twice FedAvg's, both ways; memory: N on each device, N on the server
    source: Karimireddy et al. 2020, ICML (algorithm 1)

    All contributions weigh alike, as in the paper. Devices train by SGD without momentum and with one learning rate
    for all parameters, which may change from step to step: otherwise (w - w_k) / (K h) is no mean of gradients.
    What a lossy compressor leaves out of a variate is owed by feedback, and the law then holds with what is owed.
    """

    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.server_learning_rate > 0,
            f"server_learning_rate is above 0, not {self.server_learning_rate}: write SCAFFOLD()",
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
        return "SCAFFOLD takes the way that a device went, over its steps and learning rate, for its mean gradient"

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
        if way == 0:  # it made no step, and knows no gradient
            return (pseudo_gradient, torch.zeros_like(pseudo_gradient)), memory
        change = pseudo_gradient / way - shared[VARIATE]
        return (pseudo_gradient, change), {VARIATE: memory[VARIATE] + change}

    def weight(self, work: LocalWork, staleness: int) -> float:
        return 1.0

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        pseudo_gradient, change = means
        parameters.sub_(pseudo_gradient, alpha=self.server_learning_rate)
        memory[VARIATE].add_(change, alpha=cohort.contributions / cohort.clients)
