"""Momentum transfer from the optimizer into the compressor: training stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.momentum_training import ALL, MIXED, Cycle, alone, close, go, one_cycle, sgd, together
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters, seeded
from torch import Tensor, nn

from gossamer.algorithms.compressors import DGC, Compressor
from gossamer.base.aggregation import Moments
from gossamer.train.moments.transfer import SGDMomentumTransfer

# -- what must be equal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [None, one_cycle])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("recipe", [ALL, MIXED])
def test_sending_all_without_masking_is_momentum_sgd(recipe: str, nesterov: bool, cycle: Cycle | None) -> None:
    close(together(recipe, cycle=cycle, nesterov=nesterov), alone(cycle=cycle, nesterov=nesterov))


def test_weight_decay_everywhere_has_momentum_too() -> None:
    close(together(ALL, weight_decay=0.1, nesterov=True), alone(weight_decay=0.1, nesterov=True))
    close(together(ALL, weight_decay=0.1, foreach=True), alone(weight_decay=0.1))


def matrices(momentum: float, recipe: str) -> Tensor:
    """A model without biases, which would keep their momentum in the optimizer; no decay."""

    def work(worker: Worker) -> Tensor:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        worker.attach(model, optimizer, recipe)
        go(model, optimizer, lambda step: loss_of(model, step, worker.rank).backward(), None)
        return parameters(model)

    return agree(cluster(work, 3))


def test_masking_what_is_sent_makes_plain_sgd_of_sending_all() -> None:
    masked = matrices(0.9, "Route(DGC(density=1.0), smallest=0)")
    close(masked, matrices(0.0, "Dense()"))
    with pytest.raises(AssertionError):
        close(masked, matrices(0.9, "Dense()"))
    close(matrices(0.9, ALL), matrices(0.9, "Dense()"))


def test_momentum_from_before_goes_on() -> None:
    def half(optimizer: torch.optim.Optimizer, steps: range, backward: Callable[[int], None]) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(step)
            optimizer.step()

    def work(worker: Worker, recipes: list[str]) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        for number, recipe in enumerate(recipes):
            with worker.attach(model, optimizer, recipe) as session:
                session._leave.detach()  # the next session meets over the same transport
                half(
                    optimizer,
                    range(4 * number, 4 * number + 4),
                    lambda step: loss_of(model, step, worker.rank).backward(),
                )
        return parameters(model)

    close(agree(cluster(lambda worker: work(worker, ["Dense()", ALL]), 3)), alone())


def test_a_world_of_one_is_plain_training_with_any_optimizer() -> None:
    assert torch.equal(together("DGC(0.01)", 1), alone(1))

    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, torch.optim.AdamW(model.parameters(), 0.1), "DGC(0.01)", clip_norm=1.0)

    cluster(work, 1)


# -- twins -------------------------------------------------------------------------------------------------------------


def test_momentum_applied_twice_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SGDMomentumTransfer.step

    def twice(self: SGDMomentumTransfer, group: Any, owned: Any) -> Any:
        return [part | {"momentum": group["momentum"]} for part in honest(self, group, owned)]

    monkeypatch.setattr(SGDMomentumTransfer, "step", twice)
    with pytest.raises(AssertionError):
        close(together(ALL), alone())


def test_momentum_read_once_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGDMomentumTransfer, "now", lambda self: Moments(0.9))
    close(together(ALL), alone())
    with pytest.raises(AssertionError):
        close(together(ALL, cycle=one_cycle), alone(cycle=one_cycle))


def test_decay_without_momentum_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SGDMomentumTransfer.step
    monkeypatch.setattr(
        SGDMomentumTransfer, "step", lambda self, group, owned: honest(self, group | {"momentum": 0.0}, owned)
    )
    with pytest.raises(AssertionError):
        close(together(ALL, weight_decay=0.1), alone(weight_decay=0.1))


# -- long runs ---------------------------------------------------------------------------------------------------------


def test_training_learns_with_little() -> None:
    """The loss of the model that all share falls nearly as far with a twentieth of the entries as with all."""

    def work(worker: Worker, compressor: Compressor | str) -> float:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        worker.attach(model, optimizer, compressor)
        for _ in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, 0, worker.rank)
            loss.backward()
            optimizer.step()
        return float(loss_of(model, 0, 0).detach() + loss_of(model, 0, 1).detach())

    dense, little = (cluster(lambda worker, c=c: work(worker, c), 2)[0] for c in ("Dense()", DGC(density=0.05)))
    begin = float(loss_of(network(0), 0, 0).detach() + loss_of(network(0), 0, 1).detach())
    assert little - dense < 0.3 * (begin - dense)
