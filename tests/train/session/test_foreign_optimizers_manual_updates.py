"""Updates by hand: where they would reach no other rank they are an error; where gradients are averaged they serve."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from support.sessions import alone, sgd
from support.virtual_workers import Worker, agree, batch, cluster, loss_of, network, notices, parameters
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import mse_loss
from torch.optim import SGD

from gossamer.errors import LoopError
from gossamer.train.session import foreign_optimizers

Update = Callable[[nn.Module], None]
RATE = 0.1
AROUND = ["LocalSGD(period=4)", "DiLoCo(period=4)", "DelayedAveraging(delay=2)", "Gossip() + Ring()"]


def by_version(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(RATE * parameter.grad)


def by_data(model: nn.Module) -> None:
    """As in torch's word_language_model example. The counter of writes stays as it is."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-RATE)


def train_by_hand(worker: Worker, recipe: str, update: Update, passes: int = 6) -> tuple[Tensor, int]:
    model, _, session = worker.start(network(0), sgd, recipe)
    with session.epoch():
        for step in range(passes):
            model.zero_grad()
            loss_of(model, step, worker.rank).backward()
            update(model)
    return parameters(model), session.steps


@pytest.mark.parametrize("update", [by_version, by_data])
@pytest.mark.parametrize("recipe", AROUND)
def test_updates_by_hand_that_would_never_be_sent_are_an_error(recipe: str, update: Update) -> None:
    with pytest.raises(LoopError, match=r"SGD, the attached optimizer, makes no step.*EveryStep\(\)"):
        cluster(lambda worker: train_by_hand(worker, recipe, update), 2)


def test_rare_updates_by_hand_that_would_never_be_sent_are_an_error() -> None:
    """Each one uses the gradients of more than half as many passes as the search lasts where nothing changes."""

    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd, "LocalSGD(period=4)")
        for step in range(3 * foreign_optimizers.MOST_PASSES):
            loss_of(model, step, worker.rank).backward()
            if step % 12 == 11:
                by_data(model)
                model.zero_grad()

    with pytest.raises(LoopError, match="the loop updates them by hand"):
        cluster(work, 2)


@pytest.mark.parametrize("update", [by_version, by_data])
def test_updates_by_hand_of_averaged_gradients_equal_one_process(update: Update) -> None:
    results = cluster(lambda worker: train_by_hand(worker, "Dense()", update, 5), 2)
    expected = alone_by_hand()
    torch.testing.assert_close(agree([ended for ended, _ in results]), expected)
    assert [steps for _, steps in results] == [5, 5], "every pass whose gradients were used is a step"


def alone_by_hand() -> Tensor:
    model = network(0)
    for step in range(5):
        model.zero_grad()
        ((loss_of(model, step, 0) + loss_of(model, step, 1)) / 2).backward()
        by_version(model)
    return parameters(model)


@pytest.mark.parametrize("update", [by_version, by_data])
def test_manual_updates_keep_the_residual(update: Update) -> None:
    """The same steps with an optimizer end with the same bits: what TopK left out is sent later in both loops."""

    def by_optimizer(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = SGD(model.parameters(), RATE)
        session = worker.attach(model, optimizer, "TopK(0.2)")
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        session.close()
        return parameters(model)

    by_hand = cluster(lambda worker: train_by_hand(worker, "TopK(0.2)", update)[0], 2)
    torch.testing.assert_close(agree(by_hand), agree(cluster(by_optimizer, 2)))


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", *AROUND])
def test_an_update_by_hand_within_backward_is_an_error(recipe: str) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd, recipe)

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-RATE)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        loss_of(model, 0, worker.rank).backward()

    with pytest.raises(LoopError, match=r"modified within backward\(\), by a hook"):
        cluster(work, 2)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=4)"])
def test_an_optimizers_step_within_backward_is_an_error(recipe: str, attached: bool) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, recipe)
        stepped = optimizer if attached else SGD(model.parameters(), RATE)
        first, *_ = model.parameters()  # whose gradient comes last
        first.register_post_accumulate_grad_hook(lambda _: stepped.step())
        loss_of(model, 0, worker.rank).backward()

    with pytest.raises(LoopError, match=r"SGD makes a step within backward\(\), by a hook"):
        cluster(work, 2)


@pytest.mark.parametrize("recipe", ["Dense()", *AROUND])
def test_the_first_step_of_the_optimizer_ends_the_search(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    hashes = foreign_optimizers.tensor_hashes
    monkeypatch.setattr(foreign_optimizers, "tensor_hashes", lambda tensors: looked.append(1) or hashes(tensors))

    def work(worker: Worker) -> int:
        model, optimizer, _ = worker.start(network(0), sgd, recipe)
        before = len([hook for p in model.parameters() for hook in p._post_accumulate_grad_hooks])  # type: ignore[attr-defined]
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        after = len([hook for p in model.parameters() for hook in p._post_accumulate_grad_hooks])  # type: ignore[attr-defined]
        return before - after

    assert cluster(work, 2) == [6, 6], "each parameter keeps the hook of its synchronizer only"
    assert len(looked) == 5, "twice around each rank's first backward pass, and at the first forward pass of rank 0"


@pytest.mark.parametrize("recipe", AROUND)
def test_passes_without_an_update_and_one_loaded_state_are_no_updates(recipe: str) -> None:
    """A dry pass before a state is loaded, and the passes that one step accumulates."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        loss_of(model, 0, worker.rank).backward()
        model.load_state_dict(network(1).state_dict())
        for step in range(20):
            loss_of(model, step, worker.rank).backward()
        optimizer.step()
        with session.averaged_parameters(model):
            return parameters(model)

    agree(cluster(work, 2))


def test_a_state_that_is_loaded_before_a_pass_that_fails_is_one_change() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "LocalSGD(period=4)")
        loss_of(model, 0, worker.rank).backward()
        model.load_state_dict(network(1).state_dict())
        first, *_ = model.parameters()  # whose gradient comes last
        failing = first.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 1, worker.rank).backward()
        failing.remove()
        optimizer.zero_grad()
        loss_of(model, 1, worker.rank).backward()
        optimizer.step()
        with session.averaged_parameters(model):
            return parameters(model)

    agree(cluster(work, 2))


def test_a_world_of_one_updates_as_it_likes() -> None:
    (ended, _), *_ = cluster(lambda worker: train_by_hand(worker, "LocalSGD(period=4)", by_data), 1)
    assert not torch.equal(ended, alone(1, 0))


def test_an_update_by_hand_after_an_optimizers_steps_is_a_step() -> None:
    def work(worker: Worker) -> int:
        model, optimizer, session = worker.start(network(0), sgd)
        with session.epoch():
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step, worker.rank).backward()
                if step == 3:
                    by_version(model)
                else:
                    optimizer.step()
        return session.steps

    assert cluster(work, 2) == [4, 4]


# -- loops without backward() and optimizer.step() ---------------------------------------------------------------------


def by_autograd_grad(model: nn.Module, step: int, rank: int) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss_of(model, step, rank), [*model.parameters()]), strict=True
    ):
        parameter.data.sub_(RATE * gradient)


def by_functions(model: nn.Module, step: int, rank: int) -> None:
    """The module keeps its parameters."""
    inputs, targets = batch(step, rank)
    grad(lambda held: mse_loss(functional_call(model, held, (inputs,)), targets))(dict(model.named_parameters()))


def by_given_gradients(model: nn.Module, step: int, rank: int) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss_of(model, step, rank), [*model.parameters()]), strict=True
    ):
        parameter.grad = gradient


def evaluated(model: nn.Module, step: int, rank: int) -> None:
    model.eval()
    model.load_state_dict(network(step).state_dict())
    loss_of(model, step, rank)


def not_communicated(
    train: Callable[[nn.Module, int, int], None], recipe: str, *, epoch: bool = True, steps: bool = False
) -> int:
    """The number of notices that nothing was communicated."""

    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        with session.epoch() if epoch else nullcontext():
            for step in range(3):
                train(model, step, worker.rank)
                if steps:
                    optimizer.step()
        session.close()

    with notices() as said:
        cluster(work, 2)
    return sum("no step was communicated" in each and "parameter.grad = gradient" in each for each in said)


@pytest.mark.parametrize("epoch", [True, False])
@pytest.mark.parametrize("train", [by_autograd_grad, by_functions])
@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
def test_a_loop_without_backward_and_steps_is_reported_once(
    recipe: str, train: Callable[[nn.Module, int, int], None], epoch: bool
) -> None:
    assert not_communicated(train, recipe, epoch=epoch) == 1


def test_gradients_given_to_the_optimizer_and_evaluations_are_not_reported() -> None:
    assert not_communicated(by_given_gradients, "Dense()", steps=True) == 0
    assert not_communicated(evaluated, "Dense()") == 0
    assert not_communicated(lambda model, step, rank: loss_of(model, step, rank), "Dense()") == 0
    assert not_communicated(by_autograd_grad, "Silent()") == 0
    assert not_communicated(lambda model, step, rank: loss_of(model, step, rank).backward(), "Dense()") == 0
