"""FedOpt: the server applies an optimizer to the devices' mean pseudo-gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import server_optimizer
from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, Memory
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
    """FedAvg with a server optimizer: Adam, Yogi, Adagrad or one of torch's steps along the mean pseudo-gradient.

    d = mean of pseudo-gradients;  m <- beta1 m + (1 - beta1) d;  w <- w - learning_rate m / (sqrt(v) + tau)
    adam:    v <- beta2 v + (1 - beta2) d^2
    yogi:    v <- v - (1 - beta2) d^2 sign(v - d^2)
    adagrad: v <- v + d^2
    law:    "torch.SGD" with learning_rate 1 and beta1 0 is FedAvg, bit for bit
    bytes:  FedAvg's; memory: 2 N on the server
    source: Reddi et al. 2021, ICLR (algorithm 2); Hsu et al. 2019, arXiv:1909.06335 ("torch.SGD": FedAvgM)

    The paper calls learning_rate eta, tau the degree of adaptivity, and -d the pseudo-gradient Delta_t. As in the paper
    v starts at tau^2 without bias correction, so "adam" is not torch's Adam. Any optimizer of torch that steps on a
    flat tensor can be named, such as "torch.SGD" or "torch.NAdam": its lr is learning_rate, its momentum or betas are
    beta1 and beta2, its eps is tau, and all other settings are torch's defaults. Averaged buffers, such as BatchNorm's
    statistics, are averaged without the optimizer.

    Args:
        optimizer: "adam", "yogi", "adagrad", or "torch." and the name of a class in torch.optim.
        learning_rate: of the server; use 1.0 with "torch.SGD".
        beta1: decay of the momentum, in [0, 1).
        beta2: decay of the variance, in [0, 1).
        tau: added to the root of the variance; larger is less adaptive.
        fraction: fraction of all clients that train in a round.
        local_steps, local_epochs, pull, aggregator, secure, privacy, stale_after: as for FedAvg.

    Example:
        >>> gossamer.FedOpt("yogi", learning_rate=0.01)
        FedOpt(optimizer='yogi')
    """

    optimizer: str = "adam"
    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.learning_rate > 0,
            f"learning_rate must be above 0, got {self.learning_rate}. Write FedOpt({self.optimizer!r}, "
            "learning_rate=0.01).",
        )
        for field in ("beta1", "beta2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"{field} must be in [0, 1), got {value}. Write FedOpt({field}=0.9).")
        require(self.tau > 0, f"tau must be above 0, got {self.tau}. Write FedOpt(tau=0.001).")
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
