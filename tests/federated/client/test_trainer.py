"""Trainer: a loop that trains another model is refused, one that trains for as long as it likes is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.federations import data_of, model_of, one_pass
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated import FedAvg, FederatedStrategy
from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, Update
from gossamer.federated.client.functions import stepping
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.messages import Task
from gossamer.federated.model_state import ModelState
from gossamer.federated.virtual.simulate import Simulation
from gossamer.federated.virtual.vectorized_training import ManyAtOnce

Function = Callable[[nn.Module, Round], Update]


def op_of(model: nn.Module, client: int = 1, anchor: Tensor | None = None) -> Train:
    flat = ModelState.of(model).read(model).flat if anchor is None else anchor
    return Train(client=client, task=Task(round=2, version=0), anchor=flat, shared={}, memory={})


def trainer_of(function: Function, strategy: FederatedStrategy | None = None) -> tuple[Trainer, nn.Module]:
    model = model_of()
    return Trainer(model, ModelState.of(model), strategy or FedAvg(), function), model


def trained(function: Function, strategy: FederatedStrategy | None = None) -> Trained:
    trainer, model = trainer_of(function, strategy)
    return trainer(op_of(model))


# -- another model -------------------------------------------------------------------------------------------------


def trains_its_own(model: nn.Module, told: Round) -> Update:
    return one_pass(model_of(), told)


def trains_a_copy(model: nn.Module, told: Round) -> Update:
    return one_pass(copy.deepcopy(model), told)


@pytest.mark.parametrize("function", [trains_its_own, trains_a_copy])
def test_training_another_model_is_refused(function: Function) -> None:
    with pytest.raises(LoopError, match=r"Client 1 says that it trained on 8 samples in round 2, .* Train that model"):
        trained(function)


def unseen(model: nn.Module, told: Round) -> Update:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 0.5
    return Update(samples=3)


def skips_its_steps(model: nn.Module, told: Round) -> Update:
    """As a scaler does that meets infinite gradients."""
    model(data_of(1)[0]).mean().backward()
    return Update(samples=3)


def standing(model: nn.Module, told: Round) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()
    return Update(samples=3)


@pytest.mark.parametrize("function", [unseen, skips_its_steps, standing])
def test_whoever_trains_the_given_model_counts_however_it_does(function: Function) -> None:
    assert trained(function).work.samples == 3


# -- nothing to train on -------------------------------------------------------------------------------------------


def test_a_device_without_data_does_not_count() -> None:
    assert trained(lambda model, told: Update(samples=0)).work.samples == 0


def drops_the_last(model: nn.Module, told: Round) -> Update:
    """Its loader leaves out the only batch, which is not whole."""
    for _ in told.batches([]):
        raise AssertionError
    return Update(samples=3)


def test_a_device_without_a_batch_does_not_count_and_that_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer, model = trainer_of(drops_the_last)
    assert [trainer(op_of(model, client)).work.samples for client in (4, 5)] == [0, 0]
    (said,) = (record.message for record in caplog.records)
    assert "Client 4 has 3 samples and no batch to train on in round 2" in said
    assert "drop_last" in said


@pytest.mark.parametrize(
    ("steps", "counts"), [(lambda told: list(told.batches([])), True), (lambda told: [], False)], ids=["asked", "own"]
)
def test_steps_that_are_told_are_checked_alike(steps: Callable[[Round], Any], counts: bool) -> None:
    def train(model: nn.Module, told: Round) -> SGDSteps:
        return SGDSteps(loss=lambda model, batch: model(batch).sum(), batches=steps(told), learning_rate=0.1, samples=3)

    model = model_of()
    state, op = ModelState.of(model), op_of(model)
    for way in (
        lambda: Trainer(model, state, FedAvg(), stepping(train))(op),
        lambda: next(ManyAtOnce(model, state, FedAvg(), train).train([op])),
    ):
        if counts:
            assert way().work.samples == 0
        else:
            with pytest.raises(LoopError, match="Train that model"):
                way()


# -- how long ------------------------------------------------------------------------------------------------------


def as_it_likes(model: nn.Module, told: Round) -> Update:
    inputs, targets = data_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    return Update(samples=8)


@pytest.mark.parametrize("strategy", [FedAvg(local_steps=3), FedAvg(local_epochs=3)], ids=repr)
def test_a_length_that_is_ignored_is_noticed_once(
    strategy: FederatedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, model = trainer_of(as_it_likes, strategy)
    for client in (1, 2):
        trainer(op_of(model, client))
    (said,) = (record.message for record in caplog.records)
    assert "=3, and the client function never called round.batches()" in said


@pytest.mark.parametrize(
    ("function", "strategy"),
    [(as_it_likes, FedAvg()), (as_it_likes, FedAvg(local_steps=1)), (one_pass, FedAvg(local_epochs=3))],
)
def test_who_trains_as_long_as_was_asked_hears_nothing(
    function: Function, strategy: FederatedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    trained(function, strategy)
    assert not caplog.records


# -- lower precision -----------------------------------------------------------------------------------------------


def half() -> nn.Module:
    return nn.Linear(64, 1, dtype=torch.bfloat16)


def test_what_a_device_does_not_train_is_no_part_of_what_it_learned() -> None:
    """Though its model holds the round's parameters only roughly."""

    def one_entry(model: nn.Module, told: Round) -> Update:
        with torch.no_grad():
            next(model.parameters()).view(-1)[5] += 1.0
        return Update(samples=1)

    model = half()
    anchor = torch.linspace(0.1, 0.9, 65)
    found = Trainer(model, ModelState.of(model), FedAvg(), one_entry)(op_of(model, anchor=anchor))
    assert found.anchor is not None
    learned = found.anchor - found.flat
    assert learned.nonzero().flatten().tolist() == [5]
    assert (anchor - found.flat).count_nonzero() > 30  # the twin: all that it rounds off is sent
    assert torch.equal(found.anchor, anchor.bfloat16().float())


def test_versions_keep_what_devices_round_off() -> None:
    def once(model: nn.Module, told: Round) -> Update:
        with torch.no_grad():
            next(model.parameters()).view(-1)[5] += 1.0 if told.index == 0 else 0.0
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return Update(samples=1)

    versions: list[Tensor] = []
    simulation = Simulation(
        once, half, "FedOpt('torch.SGD', learning_rate=0.3, beta1=0.0, fraction=1.0)", clients=2, rounds=3,
        on_round=lambda record: versions.append(simulation.engine._rounds.model.parameters.clone()),
    )  # fmt: skip
    simulation.run()
    first, *later = versions
    assert not torch.equal(first, first.bfloat16().float())
    assert all(torch.equal(first, each) for each in later)
