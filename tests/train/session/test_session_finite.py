"""Non-finite gradients in sessions: no rank takes the step, and the origin is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.sessions import RECIPES, sgd
from support.virtual_workers import Worker, agree, batch, cluster, heard, network, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.compressors import Feedback
from gossamer.errors import NonFiniteError
from gossamer.train.session.session import Session


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


def test_promise_9_who_and_where_is_named_and_five_in_a_row_stop() -> None:
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
def test_the_rank_that_met_it_says_which_batch_it_was(recipe: str) -> None:
    assert batches_told(recipe) == [(1, 2), (1, None)]


def test_without_epochs_the_count_goes_on() -> None:
    assert batches_told("Dense()", lambda session: nullcontext()) == [(1, 6), (1, None)]


def test_no_batch_is_named_where_the_numbers_of_many_travel() -> None:
    assert {batch for _, batch in batches_told("EveryStep(delay=1)")} == {None}
