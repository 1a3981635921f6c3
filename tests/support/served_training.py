"""Training on servers, real endpoints on loopback, one thread a worker; and alone, to compare."""

from __future__ import annotations

import torch
from support import training_loops
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, trained_alone
from torch import nn
from torch.nn.functional import mse_loss

from gossamer.train.session.session import Session

ROUNDS = {
    "sync": "ParameterServer(mode='sync')",
    "one shard": "ParameterServer(mode='sync', shards=1)",
    "stale 0": "ParameterServer(mode='stale', staleness=0)",
}


def begun(worker: Worker, recipe: str, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return model, optimizer, worker.attach(model, optimizer, recipe)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    x, y = batch(number, rank)
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(worker: Worker, recipe: str, steps: int = 5) -> torch.Tensor:
    model, optimizer, session = begun(worker, recipe)
    for number in range(steps):
        step(model, optimizer, number, worker.rank)
    session.close()
    return parameters(model)


def alone(world: int, steps: int = 5) -> torch.Tensor:
    """One process on the joined batches, from where rank 0 begins."""
    rule = training_loops.sgd(lr=0.05, momentum=0.9)
    return trained_alone(rule, steps, lambda step: [batch(step, rank) for rank in range(world)])


def check_joined(recipe: str, world: int) -> None:
    found = cluster(lambda worker: trained(worker, recipe), world)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], alone(world), rtol=0, atol=1e-12)


def check_all_learn_and_end_alike(recipe: str) -> None:
    """Three workers train to a lower loss, and end with equal parameters.

    The first loss is that of a model without training: a worker whose thread starts late may find a trained one.
    """

    def run(worker: Worker) -> tuple[float, float, torch.Tensor]:
        model, optimizer, session = begun(worker, recipe, momentum=0.0)
        losses = [step(model, optimizer, 0, worker.rank) for _ in range(48)]
        session.close()
        return loss_of(network(), 0, worker.rank).item(), losses[-1], parameters(model)

    found = cluster(run, 3)
    assert all(torch.equal(values, found[0][2]) for *_, values in found)
    assert sum(last for _, last, _ in found) < 0.8 * sum(first for first, *_ in found)
