"""FedOpt: the server applies an optimizer to the devices' mean pseudo-gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated_rules.base import CohortSummary, FederatedStrategy, Memory
from gossamer.errors import RecipeError, require

MOMENTUM, VARIANCE = "momentum", "variance"


def _adam(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.mul_(beta2).add_(square, alpha=1 - beta2)


def _yogi(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.sub_(square * torch.sign(variance - square), alpha=1 - beta2)


def _adagrad(variance: Tensor, square: Tensor, beta2: float) -> None:
    variance.add_(square)


VARIANCES: dict[str, Callable[[Tensor, Tensor, float], None]] = {"adam": _adam, "yogi": _yogi, "adagrad": _adagrad}


# -- torch's optimizers on flat parameters, with their state as plain tensors ------------------------------------------


TORCH = "torch."  # prefix of an optimizer's name
KEPT = "optimizer."  # prefix of a state's name in the memory


class Settings(NamedTuple):
    """Settings by torch's names; an optimizer receives those that it accepts."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float

    def of(self, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
        known = inspect.signature(kind).parameters
        named = {
            "lr": self.learning_rate,
            "momentum": self.beta1,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
        }
        return {name: value for name, value in named.items() if name in known}


def check_optimizer(name: str, others: tuple[str, ...], settings: Settings) -> None:
    """Raise RecipeError if the optimizer cannot step repeatedly on a flat tensor. others: built-in names."""
    kind = _kind(name)
    if kind is None:
        known = ", ".join(f'"{each}"' for each in others)
        bare = name.removeprefix(TORCH).lower()
        near = next((each for each in dir(torch.optim) if each.lower() == bare and _kind(TORCH + each)), "SGD")
        raise RecipeError(
            f"There is no server optimizer {name!r}. Available are {known}, and those of torch.optim, prefixed by "
            f'"torch.". Write FedOpt("adam"), or FedOpt("torch.{near}").'
        )
    parameters, memory = torch.zeros(2), Memory()
    try:
        for _ in range(2):
            take_step(name, settings, parameters, memory, torch.ones(2))
    except Exception as error:
        raise RecipeError(
            f"{name} cannot step on flat parameters with a gradient alone ({error}), and a server has no other "
            'inputs. Write FedOpt("adam"), or FedOpt("torch.SGD", learning_rate=1.0).'
        ) from error


@torch.no_grad()
def take_step(name: str, settings: Settings, parameters: Tensor, memory: Memory, gradient: Tensor) -> None:
    """Update parameters, (n,), and memory, which is empty before the first step."""
    kind = _kind(name)
    assert kind is not None
    weight = nn.Parameter(parameters)
    weight.grad = gradient
    optimizer = kind([weight], **settings.of(kind))
    for key, value in memory.items():
        optimizer.state[weight][key.removeprefix(KEPT)] = value
    optimizer.step()
    for key, value in optimizer.state[weight].items():
        if value is not None:
            memory[KEPT + key] = _tensor(key, value)


def _tensor(key: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"its state {key} is not a tensor")
    return value


def _kind(name: str) -> type[torch.optim.Optimizer] | None:
    kind = getattr(torch.optim, name.removeprefix(TORCH), None) if name.startswith(TORCH) else None
    is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    return kind if is_optimizer and kind is not torch.optim.Optimizer else None


# -- the strategy ------------------------------------------------------------------------------------------------------


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
            check_optimizer(self.optimizer, tuple(VARIANCES), self._settings)

    @property
    def _settings(self) -> Settings:
        return Settings(self.learning_rate, self.beta1, self.beta2, self.tau)

    def server_memory(self, parameters: Tensor) -> Memory:
        if self.optimizer not in VARIANCES:
            return {}
        return {MOMENTUM: torch.zeros_like(parameters), VARIANCE: torch.full_like(parameters, self.tau**2)}

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        if self.optimizer not in VARIANCES:
            take_step(self.optimizer, self._settings, parameters, memory, means[0])
            return
        memory[MOMENTUM].mul_(self.beta1).add_(means[0], alpha=1 - self.beta1)
        VARIANCES[self.optimizer](memory[VARIANCE], means[0].square(), self.beta2)
        parameters.addcdiv_(memory[MOMENTUM], memory[VARIANCE].sqrt().add_(self.tau), value=-self.learning_rate)
