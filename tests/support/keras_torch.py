"""The training of keras_worker.py in torch, by gossamer.attach: the same weights, batches and names."""

from __future__ import annotations

from typing import Any

import torch
from support.keras_data import BATCH, RATES, batches, weights
from support.virtual_workers import Worker, cluster, heard
from torch import Tensor, nn

from gossamer import events


class Dense(nn.Module):
    """A Keras layer with its names and shapes."""

    def __init__(self, kernel: Any, bias: Any = None) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.tensor(kernel))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel if self.bias is None else x @ self.kernel + self.bias


def in_torch(worker: Worker, recipe: str, kind: str, steps: int) -> list[list[float]]:
    """gossamer.attach and torch's SGD, with the weights and batches of the Keras model."""
    given = weights(kind, worker.rank)
    layers = [Dense(*given[place : place + 2]) for place in range(0, len(given), 2)]
    model = layers[0] if kind == "linear" else nn.Sequential(layers[0], nn.Tanh(), layers[1])
    optimizer = torch.optim.SGD(model.parameters(), RATES[kind])
    session = worker.attach(model, optimizer, recipe)
    x, y = (torch.tensor(each).reshape(steps, BATCH, -1) for each in batches(kind, worker.rank, steps))
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[step]), y[step]).backward()
        optimizer.step()
    merged = session._synchronizer.merge() or {}
    return [merged.get(name, each).detach().flatten().tolist() for name, each in model.named_parameters()]


def torch_run(recipe: str, kind: str, steps: int) -> tuple[list[list[float]], list[int]]:
    with heard(events.StepEnded) as found:
        ranks = cluster(lambda worker: in_torch(worker, recipe, kind, steps), 2)
    assert ranks[0] == ranks[1]
    return ranks[0], sorted(event.bytes_sent for event in found)
