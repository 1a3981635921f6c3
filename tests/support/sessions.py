"""Training that tests of sessions compare: by virtual workers, and by one process on the joined batch."""

from __future__ import annotations

from typing import Any

import torch
from support.virtual_workers import Worker, batch, loss_of, network, parameters, trained_alone
from torch import Tensor, nn

RECIPES = [
    "Dense()",
    "Dense(dtype='bfloat16')",
    "TopK(0.1)",
    "Int8()",
    "PowerSGD(rank=2)",
    "ARCTopK(density=0.1, row=8)",
    "SharedMask(density=0.1)",
    "Route(Feedback(PowerSGD(2)), rest=Feedback(Int8()))",
    "Feedback(TopK(0.1), rule='ef21', momentum=0.5)",
    "Warmup(TopK(0.05))",
]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def train(worker: Worker, recipe: Any = None, steps: int = 5, *, set_to_none: bool = True, **options: Any) -> Tensor:
    model, optimizer, _ = worker.start(network(worker.rank), sgd, recipe, **options)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    return parameters(model)


def alone(world: int, steps: int = 5) -> Tensor:
    """One process on the joined batch."""
    return trained_alone(sgd, steps, lambda step: [batch(step, rank) for rank in range(world)])
