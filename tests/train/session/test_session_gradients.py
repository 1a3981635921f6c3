"""Gradients in sessions: missing on some ranks, accumulated over several passes, and thrown away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import RECIPES, sgd
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    heard,
    joined,
    loss_of,
    network,
    notices,
    parameters,
    seeded,
    train_step,
    trained_alone,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.compressors import Feedback
from gossamer.errors import LoopError, NonFiniteError
from gossamer.train.session.session import Session

# -- parameters that do not always have a gradient ---------------------------------------------------------------------


class Branches(nn.Module):
    """A trunk, a branch that only some ranks take, one that nobody takes, and one that is frozen; two names for one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sometimes, self.never, self.frozen = (nn.Linear(6, 6).double() for _ in range(4))
        self.head = nn.Linear(6, 3).double()
        self.tied = self.trunk
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, take: bool) -> Tensor:
        x = torch.tanh(self.tied(self.frozen(torch.tanh(self.trunk(x)))))
        y: Tensor = self.head(self.sometimes(x) if take else x)
        return y


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "PowerSGD(rank=1)"])
def test_unused_frozen_and_tied_parameters(recipe: str) -> None:
    def work(worker: Worker) -> Tensor:
        with seeded(0):
            model = Branches()
        untouched = parameters(model.never)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        session = worker.attach(model, optimizer, recipe)
        for step in range(6):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            mse_loss(model(inputs, take=step > 1 and worker.rank == 1), targets).backward()
            assert model.never.weight.grad is None, "nobody used it, and yet it has a gradient"
            assert (model.sometimes.weight.grad is None) == (step < 2)
            optimizer.step()
        assert torch.equal(parameters(model.never), untouched), "weight decay moved what nobody used"
        remembered = session.state_dict()["state"]
        if "never.weight" in remembered:
            fresh = session.recipe.compressor.init(session._synchronizer.buckets[0].packed, session._at())  # type: ignore
            for key, value in remembered["never.weight"].items():
                assert torch.equal(value, fresh[key]["never.weight"]), "what nobody used left a trace"
        return parameters(model)

    agree(cluster(work, 3))


def test_a_rank_where_no_hook_fires_keeps_the_others_company() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(3):
            optimizer.zero_grad()
            if worker.rank != 1:
                loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(work, 3))


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulate(worker: Worker, recipe: str, how: str) -> Tensor:
    model, optimizer, session = worker.start(network(0), sgd, recipe)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            inputs, targets = batch(10 * step + part, worker.rank)
            loss = mse_loss(model(inputs), targets) / 3
            if how == "no_sync" and part < 2:
                with session.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    return parameters(model)


def test_no_sync_equals_a_larger_batch_and_so_does_dense_without_it() -> None:
    expected = trained_alone(
        sgd, 3, lambda step: [batch(10 * step + part, rank) for rank in range(2) for part in range(3)]
    )
    for how in ("no_sync", "every"):
        ended = agree(cluster(lambda worker, h=how: accumulate(worker, "Dense()", h), 2))
        torch.testing.assert_close(ended, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=1)", "EveryStep(delay=1)"])
def test_a_no_sync_block_within_another_ends_nothing(recipe: str) -> None:
    def work(worker: Worker, nested: bool) -> tuple[Tensor, int]:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        with session.no_sync():
            loss_of(model, 0, worker.rank).backward()
            with session.no_sync() if nested else nullcontext():
                loss_of(model, 1, worker.rank).backward()
            loss_of(model, 2, worker.rank).backward()
        counted = session.steps
        for step in (3, 4):
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model), counted

    nested, flat = (cluster(partial(work, nested=nested), 2) for nested in (True, False))
    assert [counted for _, counted in nested] == [0, 0], "a pass within the outer block was sent"
    assert torch.equal(agree([ended for ended, _ in nested]), agree([ended for ended, _ in flat]))


def test_no_sync_with_a_compressor_and_the_error_without() -> None:
    agree(cluster(lambda worker: accumulate(worker, "TopK(0.1)", "no_sync"), 2))
    with pytest.raises(LoopError, match="no_sync"):
        cluster(lambda worker: accumulate(worker, "TopK(0.1)", "every"), 2)


def in_epochs(worker: Worker, recipe: str, length: int, set_to_none: bool) -> Tensor:
    """Twelve passes in epochs of `length`, and a step after every second pass."""
    model, optimizer, session = worker.start(network(0), sgd, recipe)
    for first in range(0, 12, length):
        with session.epoch():
            for number in range(first, first + length):
                with nullcontext() if number % 2 else session.no_sync():
                    loss_of(model, number, worker.rank).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
    return parameters(model)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.5)", "LocalSGD(period=2)"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_epoch_that_ends_within_no_sync_keeps_the_gradients(recipe: str, set_to_none: bool) -> None:
    whole, parts = (
        agree(cluster(partial(in_epochs, recipe=recipe, length=length, set_to_none=set_to_none), 2))
        for length in (12, 3)
    )
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_averages_of_an_epoch_remain_for_a_step_below_it(length: int, set_to_none: bool) -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        for first in range(0, 6, length):
            with session.epoch():
                for number in range(first, first + length):
                    loss_of(model, number, worker.rank).backward()
            if (first + length) % 2 == 0:  # with length 1 and 3, two epochs are one step
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return parameters(model)

    def joint() -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        for first in range(0, 6, length):
            for number in range(first, first + length):
                inputs, targets = joined(batch(number, rank) for rank in range(2))
                mse_loss(model(inputs), targets).backward()
            if (first + length) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    with notices() as said:
        ended = agree(cluster(work, 2))
    assert said == []
    torch.testing.assert_close(ended, joint(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("more", [0, 1])
def test_gradients_outside_of_the_optimizer_remain_after_an_epoch(more: int) -> None:
    """They add up, since the optimizer does not clear them. more: batches that only rank 0 has."""

    def work(worker: Worker) -> list[Tensor]:
        model = network(0)
        weight, *others = model.parameters()
        optimizer = torch.optim.SGD(others, 0.1)
        session, found = worker.attach(model, optimizer), []
        for epoch in range(2):
            with session.epoch():
                for step in range(3 + (more if worker.rank == 0 else 0)):
                    optimizer.zero_grad()
                    loss_of(model, 10 * epoch + step, worker.rank).backward()
                    optimizer.step()
                assert weight.grad is not None
                found.append(weight.grad.clone())
            assert torch.equal(weight.grad, found[-1])
        return found

    model = network(0)
    weight, *others = model.parameters()
    optimizer, expected = torch.optim.SGD(others, 0.1), []
    for epoch in range(2):
        for step in range(3):
            optimizer.zero_grad()
            ((loss_of(model, 10 * epoch + step, 0) + loss_of(model, 10 * epoch + step, 1)) / 2).backward()
            optimizer.step()
        assert weight.grad is not None
        expected.append(weight.grad.clone())
    for found in cluster(work, 2) if not more else ():
        torch.testing.assert_close(found, expected)
    if more:
        cluster(work, 2)


def test_ranks_with_data_of_other_lengths_discard_averages_alike_at_the_end_of_an_epoch() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        with session.epoch():
            for number in range(2 + worker.rank):
                loss_of(model, number, worker.rank).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        for number in (7, 8):
            optimizer.zero_grad()
            loss_of(model, number, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    expected = trained_alone(sgd, 2, lambda step: [batch(7 + step, rank) for rank in range(2)])
    torch.testing.assert_close(agree(cluster(work, 2)), expected, atol=1e-12, rtol=1e-12)


def test_an_unused_average_of_an_epoch_is_discarded_by_zero_grad_in_the_next() -> None:
    def work(worker: Worker) -> int:
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        with session.epoch():
            loss_of(model, 5, worker.rank).backward()
        with session.epoch():
            optimizer.zero_grad()
            loss_of(model, 6, worker.rank).backward()
            optimizer.step()
        return session.steps

    assert cluster(work, 2) == [1, 1]


def test_a_recipe_is_switched_after_an_epoch_that_left_an_unused_average() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        with session.epoch():
            loss_of(model, 5, worker.rank).backward()
        session.switch("Dense(dtype='float32')", reason="test")
        for number in (7, 8):
            optimizer.zero_grad()
            loss_of(model, number, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    expected = trained_alone(sgd, 2, lambda step: [batch(7 + step, rank) for rank in range(2)])
    torch.testing.assert_close(agree(cluster(work, 2)), expected, atol=1e-6, rtol=1e-5)


def test_a_rank_without_data_keeps_the_gradients_of_no_sync() -> None:
    def work(worker: Worker) -> bool:
        model, optimizer, session = worker.start(network(0), sgd)
        with session.epoch():
            for number in range(3 if worker.rank else 5):
                with nullcontext() if number % 2 else session.no_sync():
                    loss_of(model, number, worker.rank).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return len(before) > 0 and all(map(torch.equal, before, after))

    assert cluster(work, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_graph_of_averaged_gradients_is_one_notice(create_graph: bool) -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(3):
            loss = loss_of(model, step, worker.rank)
            second = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            (loss + 0.01 * sum(each.square().sum() for each in second)).backward(create_graph=create_graph)
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    with notices() as said:
        agree(cluster(work, 2))
    assert len(said) == create_graph
    assert all("torch.autograd.grad(loss, parameters, create_graph=True)" in line for line in said)


def lbfgs(worker: Worker, recipe: str) -> Tensor:
    model = network(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    worker.attach(model, optimizer, recipe)
    inputs, targets = batch(0, worker.rank)

    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        optimizer.step(closure)
    return parameters(model)


def searching(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")


def search(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, *, named: bool) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    if named:
        optimizer.step(closure=closure)
    else:
        optimizer.step(closure)


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2)], ids=["equal batches", "weighted batches"])
def test_line_search_of_lbfgs_equals_one_process_on_the_joined_batch(sizes: tuple[int, int]) -> None:
    """Its steps depend on the loss, too, which each rank has of its own batch only."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), searching)
        for step in range(3):
            session.set_batch_weight(sizes[worker.rank])
            search(model, optimizer, *batch(step, worker.rank, sizes[worker.rank]), named=step == 1)
        return parameters(model)

    model = network(0)
    optimizer = searching(model)
    for step in range(3):
        search(model, optimizer, *joined(batch(step, rank, sizes[rank]) for rank in range(2)), named=False)
    torch.testing.assert_close(agree(cluster(work, 2)), parameters(model), rtol=1e-7, atol=1e-9)


def test_a_rank_without_data_joins_the_line_search_of_the_others() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), searching)
        for _ in range(2):
            with session.epoch():
                for step in range(2 - worker.rank):
                    search(model, optimizer, *batch(step, worker.rank), named=False)
        return parameters(model)

    agree(cluster(work, 2))


def test_lbfgs_decides_by_its_own_loss_where_ranks_train_apart() -> None:
    def work(worker: Worker) -> int:
        model, optimizer, session = worker.start(network(0), searching, "LocalSGD(period=2)")
        for step in range(2):
            search(model, optimizer, *batch(step, worker.rank), named=False)
        return session.steps

    assert cluster(work, 2) == [2, 2]


def test_lbfgs_with_dense_and_the_error_otherwise() -> None:
    cluster(lambda worker: lbfgs(worker, "Dense()"), 2)
    with pytest.raises(LoopError, match="LBFGS"):
        cluster(lambda worker: lbfgs(worker, "TopK(0.1)"), 2)


def test_a_backward_that_was_thrown_away_is_no_error() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, "TopK(0.1)")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            if step % 2:
                optimizer.step()

    cluster(work, 2)


# -- Non-finite gradients in sessions: no rank takes the step, and the origin is named ---------------------------------


def poisoned(
    worker: Worker, recipe: str, poison: Callable[[int, int], float], steps: int
) -> tuple[Tensor, Any, list[Any]]:
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = worker.attach(model, optimizer, recipe)
    seen: list[Any] = []
    for step in range(steps):
        before = parameters(model), _flat(session.state_dict()["state"])
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank)
        (mse_loss(model(inputs), targets) * poison(step, worker.rank)).backward()
        optimizer.step()
        seen.append((before, (parameters(model), _flat(session.state_dict()["state"]))))
    return parameters(model), session.steps, seen


def _flat(state: dict[str, dict[str, Tensor]]) -> Tensor:
    parts = [tensor.flatten() for each in state.values() for tensor in each.values()]
    return torch.cat(parts).clone() if parts else torch.zeros(0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_promise_9_a_bad_gradient_on_one_rank_changes_nothing_anywhere(recipe: str, value: float) -> None:
    def poison(step: int, rank: int) -> float:
        return value if step == 2 and rank == 1 else 1.0

    results = cluster(lambda worker: poisoned(worker, recipe, poison, 5), 3)
    agree([ended for ended, _, _ in results])
    for _, steps, seen in results:
        assert steps == 4
        (weights, state), (weights_after, state_after) = seen[2]
        assert torch.equal(weights, weights_after), "a skipped step moved the parameters"
        assert torch.equal(state, state_after), "a skipped step changed what is remembered"
        assert not torch.equal(seen[3][0][0], seen[3][1][0]), "training did not go on"


def test_promise_9_rank_and_tensor_are_named_and_five_skipped_steps_raise() -> None:
    named = pytest.raises(NonFiniteError, match=r'5 steps in a row.*"\d\.(weight|bias)" on rank 1')
    with heard(events.Skipped) as skipped, named:
        cluster(lambda worker: poisoned(worker, "TopK(0.1)", lambda s, r: float("nan") if r == 1 else 1.0, 9), 2)
    assert {event.rank for event in skipped} == {1}


def test_the_skip_test_catches_feedback_that_commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Feedback.aggregate

    def eager(self: Feedback, x: Any, state: Any, at: Any, out: Any = None) -> Any:
        staged = yield from honest(self, x, state, at, out)
        state["residual"].flat.copy_(staged.next_state["residual"].flat)
        return staged

    monkeypatch.setattr(Feedback, "aggregate", eager)
    with pytest.raises(AssertionError, match="remembered"):
        test_promise_9_a_bad_gradient_on_one_rank_changes_nothing_anywhere("TopK(0.1)", float("nan"))


def scaled(worker: Worker, recipe: str, scale: float, overflow: bool) -> tuple[Tensor, float, int]:
    model = network(0, torch.float32)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    session = worker.attach(model, optimizer, recipe, scaler=scaler)
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank, dtype=torch.float32)
        loss = mse_loss(model(inputs), targets)
        if overflow and step == 2 and worker.rank == 1:
            loss = loss * 1e38 * 1e38
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return parameters(model), scaler.get_scale(), session.steps


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "Int8()", "Feedback(Int8(), rule='ef21')"])
def test_grad_scaler_decides_alike_everywhere(recipe: str) -> None:
    results = cluster(lambda worker: scaled(worker, recipe, 1024.0, overflow=True), 3)
    agree([ended for ended, _, _ in results])
    assert {scale for _, scale, _ in results} == {512.0}
    assert {steps for *_, steps in results} == {4}


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "Int8()", "Feedback(Int8(), rule='ef21')"])
def test_residuals_do_not_depend_on_the_loss_scale(recipe: str) -> None:
    one = cluster(lambda worker: scaled(worker, recipe, 1.0, overflow=False), 2)[0][0]
    many = cluster(lambda worker: scaled(worker, recipe, 4096.0, overflow=False), 2)[0][0]
    assert torch.equal(one, many)


def test_float16_that_overflows_is_skipped_not_infinite() -> None:
    def poison(step: int, rank: int) -> float:
        return 1e9 if step == 1 and rank == 0 else 1.0

    results = cluster(lambda worker: poisoned(worker, "Dense(dtype='float16')", poison, 3), 2)
    assert torch.isfinite(agree([ended for ended, *_ in results])).all()
    assert results[0][1] == 2


def batches_told(
    recipe: str, epoch_of: Callable[[Session], AbstractContextManager[None]] = Session.epoch
) -> list[tuple[int | None, int | None]]:
    """(rank, batch) of all that is told where rank 1 meets a NaN in the third batch of its second epoch."""

    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, recipe)
        for epoch in range(2):
            with epoch_of(session):
                for step in range(4):
                    optimizer.zero_grad()
                    inputs, targets = batch(4 * epoch + step, worker.rank)
                    bad = (epoch, step, worker.rank) == (1, 2, 1)
                    (mse_loss(model(inputs), targets) * (float("nan") if bad else 1.0)).backward()
                    optimizer.step()

    with heard(events.Skipped) as skipped:
        cluster(work, 2)
    return sorted(((event.rank, event.batch) for event in skipped), key=str)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)"])
def test_the_rank_that_met_it_reports_which_batch_it_was(recipe: str) -> None:
    assert batches_told(recipe) == [(1, 2), (1, None)]


def test_without_epochs_the_count_continues() -> None:
    assert batches_told("Dense()", lambda session: nullcontext()) == [(1, 6), (1, None)]


def test_no_batch_is_named_where_the_numbers_of_many_travel() -> None:
    assert {batch for _, batch in batches_told("EveryStep(delay=1)")} == {None}


def test_training_resumes_bit_for_bit_after_an_epoch_in_which_a_rank_had_fewer_batches(tmp_path: Path) -> None:
    """The next exchange learns the total weight first, so it rounds otherwise than one among ranks that all trained."""

    def work(worker: Worker, first: int) -> list[Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Dense()")
        if first:
            session.load(tmp_path)
        found = []
        for epoch in range(first, 2):
            if epoch == 1 and not first:
                session.save(tmp_path)
            with session.epoch():
                for step in range(3 - worker.rank if epoch == 0 else 2):
                    session.set_batch_weight(1 + epoch + (step + worker.rank) % 3)  # 1.5 at first, on average
                    train_step(model, optimizer, 10 * epoch + step, worker.rank)
                    found.append(parameters(model))
        return found[-2:]

    whole, resumed = cluster(lambda worker: work(worker, 0), 2), cluster(lambda worker: work(worker, 1), 2)
    for states, states_after in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(states, states_after, strict=True))
