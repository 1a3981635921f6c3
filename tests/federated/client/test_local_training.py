"""Local training: hooks on a device's own loop, refused loops, and what a device returns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.federations import data_of, model_of, one_pass
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gossamer.algorithms.strategies.federated_rules import (
    SCAFFOLD,
    FedAvg,
    FederatedStrategy,
    FedNova,
    FedProx,
    LocalWork,
)
from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, Update
from gossamer.federated.client.functions import stepping
from gossamer.federated.client.local_training import LocalTraining, Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.messages import Task
from gossamer.federated.model_state import ModelState
from gossamer.federated.virtual.simulate import Simulation, SimulationSettings
from gossamer.federated.virtual.vectorized_training import ManyAtOnce

Loop = Callable[[nn.Module], Any]


def watched(strategy: FederatedStrategy, loop: Loop, model: nn.Module | None = None, **memory: float) -> LocalTraining:
    """A device's round of that loop. memory: numbers that shared and own tensors are full of."""
    model = model or nn.Linear(2, 1, dtype=torch.float64)
    state = ModelState.of(model)
    anchor = state.read(model).flat
    full = {key: torch.full_like(anchor, value) for key, value in memory.items()}
    shared = {key: full.get("shared", torch.zeros_like(anchor)) for key in strategy.shared_keys}
    own = {key: full.get("own", torch.zeros_like(anchor)) for key in strategy.memory_keys}
    local = LocalTraining(strategy, state, model, anchor, shared, own)
    with local.watching():
        loop(model)
    return local


def trained(*args: Any, **memory: float) -> LocalWork:
    return watched(*args, **memory).work(samples=1)


def stepped(make: Callable[[Any], Optimizer], count: int = 1) -> Loop:
    def loop(model: nn.Module) -> None:
        optimizer = make(model.parameters())
        for _ in range(count):
            optimizer.zero_grad()
            sum((each.sum() for each in model.parameters()), torch.zeros(())).backward()
            optimizer.step()

    return loop


def sgd(parameters: Any, **options: Any) -> SGD:
    return SGD(parameters, **{"lr": 0.5, **options})


def test_steps_and_learning_rates_are_counted() -> None:
    def decaying(model: nn.Module) -> None:
        optimizer = sgd(model.parameters())
        for rate in (0.5, 0.25, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()

    local = trained(FedAvg(), decaying)
    assert (local.steps, local.learning_rate) == (3, 0.25)


def test_an_optimizer_for_each_half_makes_no_twice_as_many_steps() -> None:
    def halves(model: nn.Module) -> None:
        for optimizer in [sgd([each]) for each in model.parameters()]:
            optimizer.step()

    assert trained(FedNova(), halves).steps == 1


def test_other_models_are_left_alone() -> None:
    def other(model: nn.Module) -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        Adam([weight], lr=0.5).step()

    assert trained(SCAFFOLD(), other).steps == 0


def test_hooks_are_gone_afterwards() -> None:
    model = nn.Linear(2, 1)
    local = watched(SCAFFOLD(), stepped(sgd), model)
    stepped(Adam)(model)
    assert local.work(1).steps == 1


def moved(strategy: FederatedStrategy, loop: Loop, **memory: float) -> Tensor:
    model = nn.Linear(2, 1, dtype=torch.float64)
    before = torch.cat([each.detach().flatten() for each in model.parameters()])
    trained(strategy, loop, model, **memory)
    return torch.cat([each.detach().flatten() for each in model.parameters()]) - before


def test_gradients_are_corrected_before_each_step() -> None:
    """Of 1 each, by rate 1/2: c - c_k = 3 - 1; a spring of 2 draws back by what was gone, 2 (-1/2)."""
    assert torch.allclose(moved(SCAFFOLD(), stepped(sgd), shared=3.0, own=1.0), torch.tensor(-1.5).double())
    assert torch.allclose(moved(FedProx(2.0), stepped(sgd, 2)), torch.tensor(-0.5).double())
    assert torch.allclose(moved(FedAvg(), stepped(sgd, 2)), torch.tensor(-1.0).double())


def test_what_a_loss_has_no_part_in_is_corrected_too() -> None:
    def only_the_bias(model: nn.Module) -> None:
        assert isinstance(model, nn.Linear)
        optimizer = sgd(model.parameters())
        model.bias.sum().backward()
        optimizer.step()

    found = moved(SCAFFOLD(), only_the_bias, shared=3.0, own=1.0)
    assert torch.allclose(found, torch.tensor([-1.0, -1.0, -1.5]).double())


def test_any_optimizer_does_for_a_spring() -> None:
    assert trained(FedProx(0.5), stepped(lambda parameters: AdamW(parameters, lr=0.1), 3)).steps == 3


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda parameters: sgd(parameters, momentum=0.9), "SGD with momentum"),
        (lambda parameters: sgd(parameters, momentum=0.9, nesterov=True), "SGD with momentum"),
        (lambda parameters: Adam(parameters), "Adam"),
    ],
)
@pytest.mark.parametrize("strategy", [SCAFFOLD(), FedNova()], ids=repr)
def test_other_optimizers_than_plain_sgd_are_refused(
    strategy: FederatedStrategy, make: Callable[[Any], Optimizer], names: str
) -> None:
    with pytest.raises(
        LoopError, match=rf"{names} is not plain SGD. Write torch.optim.SGD\(model.parameters\(\), lr=0.1\)"
    ):
        trained(strategy, stepped(make))
    assert trained(FedAvg(), stepped(make)).steps == 1


def test_weight_decay_is_part_of_the_loss() -> None:
    assert trained(SCAFFOLD(), stepped(lambda parameters: sgd(parameters, weight_decay=0.1))).steps == 1


def groups(*rates: float) -> Loop:
    def loop(model: nn.Module) -> None:
        optimizer = sgd([{"params": [each], "lr": rate} for each, rate in zip(model.parameters(), rates, strict=True)])
        optimizer.step()

    return loop


def test_several_learning_rates_are_refused_where_one_is_divided_by() -> None:
    with pytest.raises(LoopError, match="Put all parameters into one group of one optimizer"):
        trained(SCAFFOLD(), groups(0.5, 0.25))
    assert trained(SCAFFOLD(), groups(0.5, 0.5)).steps == 1
    assert trained(FedNova(), groups(0.5, 0.25)).steps == 1


def unseen(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1


@pytest.mark.parametrize("strategy", [SCAFFOLD(), FedNova(), FedProx(0.1)], ids=repr)
def test_training_without_an_optimizer_is_refused(strategy: FederatedStrategy) -> None:
    with pytest.raises(LoopError, match=r"without a step of a torch optimizer, .* Call optimizer.step\(\)"):
        trained(strategy, unseen)
    assert trained(FedAvg(), unseen).steps == 0
    assert trained(strategy, lambda model: None).steps == 0


def closure(model: nn.Module) -> None:
    optimizer = sgd(model.parameters())

    def again() -> float:
        stepped(sgd, 0)(model)
        return 0.0

    optimizer.step(again)


def test_gradients_that_appear_after_they_were_changed_are_refused() -> None:
    with pytest.raises(LoopError, match=r"was given a closure, .* Call loss.backward\(\) and then optimizer.step\(\)"):
        trained(FedProx(0.1), closure)
    assert trained(FedProx(0.0), closure).steps == 1
    with pytest.raises(LoopError, match="maximize=True out"):
        trained(FedProx(0.1), stepped(lambda parameters: sgd(parameters, maximize=True)))

    def scaled(model: nn.Module) -> None:
        optimizer = sgd(model.parameters())
        optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]  # as GradScaler does with fused ones
        optimizer.step()

    with pytest.raises(LoopError, match=r"scaler.unscale_\(optimizer\)"):
        trained(SCAFFOLD(), scaled)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)

    def loop(model: nn.Module) -> None:
        optimizer = sgd(model.parameters())
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(LoopError, match="sparse=False"):
        trained(FedProx(0.1), loop, model)
    assert trained(FedAvg(), loop, nn.Embedding(4, 2, sparse=True)).steps == 1


def test_gradients_of_half_precision_are_corrected_in_it() -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    assert trained(SCAFFOLD(), stepped(sgd), model, shared=3.0, own=1.0).steps == 1
    assert all(each.grad is not None and (each.grad == 3.0).all() for each in model.parameters())


Function = Callable[[nn.Module, Round], Update]


def op_of(model: nn.Module, client: int = 1, anchor: Tensor | None = None) -> Train:
    flat = ModelState.of(model).read(model).flat if anchor is None else anchor
    return Train(client=client, task=Task(round=2, version=0), anchor=flat, shared={}, memory={})


def trainer_of(function: Function, strategy: FederatedStrategy | None = None) -> tuple[Trainer, nn.Module]:
    model = model_of()
    return Trainer(model, ModelState.of(model), strategy or FedAvg(), function), model


def trained_by(function: Function, strategy: FederatedStrategy | None = None) -> Trained:
    trainer, model = trainer_of(function, strategy)
    return trainer(op_of(model))


# -- another model -------------------------------------------------------------------------------------------------


def trains_its_own(model: nn.Module, told: Round) -> Update:
    return one_pass(model_of(), told)


def trains_a_copy(model: nn.Module, told: Round) -> Update:
    return one_pass(copy.deepcopy(model), told)


@pytest.mark.parametrize("function", [trains_its_own, trains_a_copy])
def test_training_another_model_is_refused(function: Function) -> None:
    with pytest.raises(LoopError, match=r"Client 1 reported 8 training samples in round 2, .* Train that model"):
        trained_by(function)


def unseen_update(model: nn.Module, told: Round) -> Update:
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


@pytest.mark.parametrize("function", [unseen_update, skips_its_steps, standing])
def test_whoever_trains_the_given_model_counts_however_it_does(function: Function) -> None:
    assert trained_by(function).work.samples == 3


# -- nothing to train on -------------------------------------------------------------------------------------------


def test_a_device_without_data_does_not_count() -> None:
    assert trained_by(lambda model, told: Update(samples=0)).work.samples == 0


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
    assert "=3" in said
    assert "did not call round.batches()" in said


@pytest.mark.parametrize(
    ("function", "strategy"),
    [(as_it_likes, FedAvg()), (as_it_likes, FedAvg(local_steps=1)), (one_pass, FedAvg(local_epochs=3))],
)
def test_a_device_that_trains_as_long_as_was_asked_hears_nothing(
    function: Function, strategy: FederatedStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    trained_by(function, strategy)
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
        once,
        half,
        "FedOpt('torch.SGD', learning_rate=0.3, beta1=0.0, fraction=1.0)",
        SimulationSettings(
            clients=2,
            rounds=3,
            on_round=lambda record: versions.append(simulation.engine._rounds.model.parameters.clone()),
        ),
    )
    simulation.run()
    first, *later = versions
    assert not torch.equal(first, first.bfloat16().float())
    assert all(torch.equal(first, each) for each in later)
