"""Sharded training: models split by FSDP2, tensor parallelism or stages, and what one process makes of them.

Weights, inputs and learning rates are multiples of powers of two, so sums of a few steps are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from gossamer.train.session.session import Session

HIDDEN = 8


def exact_model(hidden: int = HIDDEN) -> nn.Sequential:
    """(n, 4) to (n, 3): the last layer's 3 rows do not divide by 4 ranks, nor by 2."""
    model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 4)
    return model


def batch(worker: int, step: int) -> Tensor:
    """(2, 4), its own for each worker and step."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randint(-2, 3, (2, 4), generator=generator).float()


def loss_of(output: Tensor) -> Tensor:
    """Linear in the output, and weighted by column: its gradients are small integers."""
    return (output * torch.tensor([1.0, 2.0, -1.0])).sum()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, workers: Sequence[int], steps: int, scale: float = 1.0
) -> None:
    """Steps on the batches of some workers together; the loss is their mean."""
    for step in range(steps):
        optimizer.zero_grad()
        for worker in workers:
            (loss_of(model(batch(worker, step))) * scale / len(workers)).backward()
        optimizer.step()


def sgd(model: nn.Module, lr: float = 2.0**-6, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def one_process(workers: Sequence[int], steps: int = 3, momentum: float = 0.0) -> dict[str, Tensor]:
    """The parameters that plain training comes to."""
    model = exact_model()
    train(model, sgd(model, momentum=momentum), workers, steps)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_fsdp(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    """The model, each layer sharded over `mesh`, then the rest."""
    model = exact_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def by_tensor_parallelism(mesh: DeviceMesh) -> nn.Module:
    """The hidden layer's units over `mesh`; the last bias is a DTensor that every rank has whole."""
    return parallelize_module(exact_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered from the ranks that hold their shards."""
    found: dict[str, Any] = {name: each.detach() for name, each in model.named_parameters()}
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any entry."""
    assert found.keys() == wanted.keys()
    with torch.no_grad():
        return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


class Stages:
    """A model of two stages on two ranks: the first sends its output on, and the second sends its gradient back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.ranks = dist.get_process_group_ranks(self.group)
        self.first = mesh.get_local_rank() == 0
        layers = exact_model()
        self.module = nn.Sequential(layers[0], layers[1]) if self.first else nn.Sequential(layers[2])

    def backward(self, inputs: Tensor) -> None:
        if self.first:
            output = self.module(inputs)
            dist.send(output.detach(), self.ranks[1], group=self.group)
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.ranks[1], group=self.group)
            output.backward(gradient)
        else:
            output = torch.empty(len(inputs), HIDDEN)
            dist.recv(output, self.ranks[0], group=self.group)
            loss_of(self.module(output.requires_grad_())).backward()
            assert output.grad is not None
            dist.send(output.grad, self.ranks[0], group=self.group)

    def train(self, optimizer: torch.optim.Optimizer, worker: int, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(batch(worker, step))
            optimizer.step()

    def wanted(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """This stage's of the whole model's parameters, by their names in it."""
        if self.first:
            return {name: each for name, each in parameters.items() if name.startswith("0.")}
        return {"0" + name[1:]: each for name, each in parameters.items() if name.startswith("2.")}


def attached(
    model: nn.Module, recipe: Any, mesh: DeviceMesh, momentum: float = 0.0, **options: Any
) -> tuple[Session, torch.optim.Optimizer]:
    optimizer = sgd(model, momentum=momentum)
    return gossamer.attach(model, optimizer, recipe, mesh=mesh, **options), optimizer
