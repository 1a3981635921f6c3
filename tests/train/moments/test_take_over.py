"""Momentum that a compressor takes, in groups that grow, also from one worker."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.elastic_groups import ElasticRun, Join
from support.virtual_workers import Rule, Worker, agree, batch, cluster, joined, loss_of, network, parameters
from torch import Tensor
from torch.nn.functional import mse_loss

from gossamer.errors import AttachError, MismatchError
from gossamer.train.moments import take_over
from gossamer.train.moments.transfer import MomentumTransfer, SGDMomentumTransfer

DGC = "Route(DGC(density=1.0, masking=False), smallest=0)"
STEPS = 6


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def trained(sizes: dict[int, int], worker: Worker) -> Tensor:
    """sizes: filled with how many workers made each step."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, DGC)
    while session.steps < STEPS:
        step = session.steps
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        sizes[step] = session._transport.world
    return parameters(model)


def trained_by(sizes: dict[int, int]) -> Tensor:
    """One process with the batches of as many workers, whose optimizer has the momentum itself."""
    model = network(0)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = joined([batch(step, rank) for rank in range(sizes[step])])
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return parameters(model)


def check_momentum_goes_on_when_a_worker_comes(world: int, op: int) -> None:
    sizes: dict[int, int] = {}
    results = ElasticRun(world, newcomers=1, join=Join(op=op))(partial(trained, sizes))
    assert {world, world + 1} == {*sizes.values()}, sizes
    agreed = agree(results)
    if world == 1:  # a newcomer is given one worker's velocity, and of several that is not their mean
        torch.testing.assert_close(agreed, trained_by(sizes), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", [6, 12])
@pytest.mark.parametrize("world", [1, 2])
def test_momentum_continues_when_a_worker_comes(world: int, op: int) -> None:
    check_momentum_goes_on_when_a_worker_comes(world, op)


def test_the_check_notices_a_newcomer_that_keeps_its_momentum_since_it_comes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(take_over, "_stays_alone", lambda transport: transport.world == 1)
    with pytest.raises((AssertionError, MismatchError)):
        check_momentum_goes_on_when_a_worker_comes(2, 6)


def momentum(rule: Rule, worker: Worker) -> MomentumTransfer | None:
    return worker.attach(model := network(0), rule(model), DGC)._step_hooks.momentum


def test_momentum_moves_in_a_group_of_one_to_which_others_may_come() -> None:
    """What it sends, and what it refuses, must not change with the number of workers."""
    assert cluster(partial(momentum, sgd), 1)[0] is None
    assert isinstance(ElasticRun(1)(partial(momentum, sgd))[0], SGDMomentumTransfer)
    with pytest.raises(AttachError, match=r"applies the momentum of torch\.optim\.SGD"):
        ElasticRun(1)(partial(momentum, adam))
