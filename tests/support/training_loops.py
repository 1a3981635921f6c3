"""Training loops for strategies: real sessions on virtual workers, and plain arithmetic to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.virtual_workers import Worker, agree, batch, cluster, heard, loss_of, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import Strategy
from gossamer.base.layout import FlatTensors
from gossamer.base.op_semantics import rank_order_mean as mean_of
from gossamer.train.checkpoint.state import AGREED_KEY
from gossamer.train.session.session import Session

__all__ = [
    "LR",
    "START",
    "Trace",
    "agree",
    "close",
    "gradient",
    "heard",
    "mean_of",
    "owed_and_in_flight",
    "run",
    "sgd",
    "spread",
    "told",
    "train",
]

LR = 0.1
START = parameters(network(0))  # what all begin with: attach gives everyone rank 0's

Rule = Callable[[nn.Module], Optimizer]


def sgd(lr: float = LR, **options: Any) -> Rule:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **options)


@dataclass
class Trace:
    """What one worker went through; the lists have an entry per step, taken after it."""

    model: nn.Module
    optimizer: Optimizer
    session: Session
    path: list[Tensor] = field(default_factory=list)
    merged: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)

    def look(self) -> None:
        self.path.append(parameters(self.model))
        with self.session.averaged_parameters(self.model):
            self.merged.append(parameters(self.model))


def train(
    worker: Worker,
    recipe: Any,
    steps: int,
    rule: Rule | None = None,
    *,
    rates: Callable[[int], float] | None = None,
    note: Callable[[Trace], Any] = lambda trace: None,
    dtype: torch.dtype = torch.float64,
) -> Trace:
    """The loop that everybody writes. rates: the learning rate by step; note: what else to remember after a step."""
    model = network(worker.rank, dtype)
    optimizer = (rule or sgd())(model)
    if isinstance(recipe, Strategy):
        recipe = Recipe(strategy=recipe)
    trace = Trace(model, optimizer, worker.attach(model, optimizer, recipe))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        trace.gradients.append(_gradients(model))
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(step)
        optimizer.step()
        trace.look()
        trace.notes.append(note(trace))
    return trace


def run(recipe: Any, steps: int = 12, *, world: int = 3, **options: Any) -> list[Trace]:
    """Traces by rank."""
    return cluster(lambda worker: train(worker, recipe, steps, **options), world)


def gradient(x: Tensor, step: int, rank: int, size: int = 4) -> Tensor:
    """Of worker `rank`'s loss in that step, where its parameters are x: (n,)."""
    model = network(0)
    with torch.no_grad():
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), x.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
    inputs, targets = batch(step, rank, size)
    mse_loss(model(inputs), targets).backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def told(trace: Trace) -> Tensor:
    """What all workers know of each other's parameters: (n,), in the model's order."""
    kept = trace.session.state_dict()["state"]
    return torch.cat([kept[name][AGREED_KEY].detach().flatten() for name, _ in trace.model.named_parameters()])


def owed_and_in_flight(trace: Trace) -> Tensor:
    """What a worker did and the others have not got yet: (n,), in the model's order."""
    session, state = trace.session, trace.session.state_dict()
    found = {name: torch.zeros_like(parameter) for name, parameter in trace.model.named_parameters()}
    for name, kept in state["state"].items():
        for key, tensor in kept.items():
            if key.endswith("residual"):
                found[name] += tensor
    for flight in state["progress"]["flights"]:
        for bucket, own in zip(session._synchronizer.buckets, flight["owns"], strict=True):
            for name, part in FlatTensors(own, bucket.layout).items():
                found[name] += part
    return torch.cat([tensor.detach().flatten() for tensor in found.values()])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def spread(tensors: Sequence[Tensor]) -> float:
    """How far apart the workers are at most."""
    together = torch.stack(list(tensors))
    return float((together.amax(0) - together.amin(0)).max())


CENTRES = [3.0, -1.0, 0.5]


def quadratic(worker: Worker, strategy: Strategy, steps: int) -> list[float]:
    """Worker i's loss is (x - c_i)^2 / 2, and x begins at 2."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([2.0 + worker.rank], dtype=torch.float64))])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    worker.attach(model, optimizer, Recipe(strategy=strategy))
    path: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model[0] - CENTRES[worker.rank]).square().sum()).backward()
        optimizer.step()
        path.append(float(model[0].detach()))
    return path
