"""Server optimizer: steps on flat parameters by any of torch's optimizers, with their state as plain tensors."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.algorithms.gossip.rules import Memory
from gossamer.errors import RecipeError

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


def check(name: str, others: tuple[str, ...], settings: Settings) -> None:
    """Raise RecipeError if the optimizer cannot step repeatedly on a flat tensor. others: built-in names."""
    kind = _found(name)
    if kind is None:
        known = ", ".join(f'"{each}"' for each in others)
        bare = name.removeprefix(TORCH).lower()
        near = next((each for each in dir(torch.optim) if each.lower() == bare and _found(TORCH + each)), "SGD")
        raise RecipeError(
            f"There is no server optimizer {name!r}. Available are {known}, and those of torch.optim, prefixed by "
            f'"torch.". Write FedOpt("adam"), or FedOpt("torch.{near}").'
        )
    parameters, memory = torch.zeros(2), Memory()
    try:
        for _ in range(2):
            step(name, settings, parameters, memory, torch.ones(2))
    except Exception as error:
        raise RecipeError(
            f"{name} cannot step on flat parameters with a gradient alone ({error}), and a server has no other "
            'inputs. Write FedOpt("adam"), or FedOpt("torch.SGD", learning_rate=1.0).'
        ) from error


@torch.no_grad()
def step(name: str, settings: Settings, parameters: Tensor, memory: Memory, gradient: Tensor) -> None:
    """Update parameters, (n,), and memory, which is empty before the first step."""
    kind = _found(name)
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


def _found(name: str) -> type[torch.optim.Optimizer] | None:
    kind = getattr(torch.optim, name.removeprefix(TORCH), None) if name.startswith(TORCH) else None
    is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    return kind if is_optimizer and kind is not torch.optim.Optimizer else None
