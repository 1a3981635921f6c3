"""Training whose momentum moves into the compressor, by virtual workers and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.virtual_workers import Worker, agree, batch, cluster, joined, loss_of, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR

ALL = "Route(DGC(density=1.0, masking=False), smallest=0)"
MIXED = "DGC(density=1.0, masking=False)"  # one matrix of three has 256 entries


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Two groups that differ in what they may."""
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": rest, "weight_decay": 0.03}]
    return torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **options})


Cycle = Callable[[torch.optim.Optimizer], Any]


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=[0.3, 0.2], total_steps=9)


def go(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], None], cycle: Cycle | None
) -> None:
    scheduler = cycle(optimizer) if cycle is not None else None
    for step in range(8):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def together(recipe: Any, world: int = 3, cycle: Cycle | None = None, **options: Any) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)
        optimizer = sgd(model, **options)
        worker.attach(model, optimizer, recipe)
        go(model, optimizer, lambda step: loss_of(model, step, worker.rank).backward(), cycle)
        return parameters(model)

    return agree(cluster(work, world))


def alone(world: int = 3, cycle: Cycle | None = None, **options: Any) -> Tensor:
    """One process on the joined batch, with torch's own momentum."""
    model = network(0)
    optimizer = sgd(model, **options)

    def backward(step: int) -> None:
        inputs, targets = joined(batch(step, rank) for rank in range(world))
        mse_loss(model(inputs), targets).backward()

    go(model, optimizer, backward, cycle)
    return parameters(model)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


REAL = [
    "DGC(0.1)",
    "Route(DGC(density=0.05, warmup=5, clip=1.0), rest=Int8(), smallest=0)",
]
