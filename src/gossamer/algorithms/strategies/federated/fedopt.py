"""FedOpt: the server follows the devices' mean pseudo-gradient by an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated import server_optimizer
from gossamer.algorithms.strategies.federated.base import CohortSummary, FederatedStrategy, Memory
from gossamer.errors import require

MOMENTUM, VARIANCE = "momentum", "variance"


def _adam(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.mul_(beta2).add_(square, alpha=1 - beta2)


def _yogi(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.sub_(square * torch.sign(variance - square), alpha=1 - beta2)


def _adagrad(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.add_(square)


VARIANCES: dict[str, Callable[[Tensor, Tensor, float], None]] = {"adam": _adam, "yogi": _yogi, "adagrad": _adagrad}


@dataclass(frozen=True, repr=False)
class FedOpt(FederatedStrategy):
    """FedAvg whose server does not jump to the mean, but follows it by an optimizer: Adam, Yogi, Adagrad, or torch's.

    d = mean of pseudo-gradients;  m <- beta1 m + (1 - beta1) d;  w <- w - learning_rate m / (sqrt(v) + tau)
    adam:    v <- beta2 v + (1 - beta2) d^2
    yogi:    v <- v - (1 - beta2) d^2 sign(v - d^2)
    adagrad: v <- v + d^2
    law:    "torch.SGD" with learning_rate 1 and beta1 0 is FedAvg, bit for bit
    bytes:  FedAvg's; memory: 2 N on the server
    source: Reddi et al. 2021, ICLR (algorithm 2); Hsu et al. 2019, arXiv:1909.06335 ("torch.SGD": FedAvgM)

    As in the paper v begins as tau^2 and nothing is corrected for its beginning, so "adam" is not torch's Adam. Any
    optimizer of torch that steps on a flat tensor goes by its name, such as "torch.SGD" or "torch.NAdam": its lr is
    learning_rate, its momentum or betas are beta1 and beta2, its eps is tau, and all else is torch's default.
    Averaged buffers, such as BatchNorm's statistics, are averaged and not optimized.
    """

    optimizer: str = "adam"
    learning_rate: float = 0.01  # of the server; "torch.SGD" takes 1.0
    beta1: float = 0.9  # share of the momentum that stays
    beta2: float = 0.99  # share of the variance that stays
    tau: float = 1e-3  # least root of a variance: larger is less adaptive

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.learning_rate > 0,
            f"learning_rate is above 0, not {self.learning_rate}: write FedOpt({self.optimizer!r}, learning_rate=0.01)",
        )
        for field in ("beta1", "beta2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"{field} is a fraction in [0, 1), not {value}: write FedOpt({field}=0.9)")
        require(self.tau > 0, f"tau is above 0, not {self.tau}: write FedOpt(tau=0.001)")
        if self.optimizer not in VARIANCES:
            server_optimizer.check(self.optimizer, tuple(VARIANCES), self._settings)

    @property
    def _settings(self) -> server_optimizer.Settings:
        return server_optimizer.Settings(self.learning_rate, self.beta1, self.beta2, self.tau)

    def server_memory(self, parameters: Tensor) -> Memory:
        if self.optimizer not in VARIANCES:
            return {}
        return {MOMENTUM: torch.zeros_like(parameters), VARIANCE: torch.full_like(parameters, self.tau**2)}

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        if self.optimizer not in VARIANCES:
            server_optimizer.step(self.optimizer, self._settings, parameters, memory, means[0])
            return
        memory[MOMENTUM].mul_(self.beta1).add_(means[0], alpha=1 - self.beta1)
        VARIANCES[self.optimizer](memory[VARIANCE], means[0].square(), self.beta2)
        parameters.addcdiv_(memory[MOMENTUM], memory[VARIANCE].sqrt().add_(self.tau), value=-self.learning_rate)
