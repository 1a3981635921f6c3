"""Parameter averaging with non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training_loops import agree, heard, sgd, spread
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters
from torch import Tensor
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.strategies import DelayedAveraging
from gossamer.errors import NonFiniteError
from gossamer.train.session.session import Session

# -- gradients ---------------------------------------------------------------------------------------------------------


def poisoned(worker: Worker, recipe: str, steps: int, bad: Callable[[int, int], bool], **options: Any) -> list[Tensor]:
    model = network(worker.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    worker.attach(model, optimizer, recipe, **options)
    path = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1])
        (loss * (math.nan if bad(step, worker.rank) else 1.0)).backward()
        optimizer.step()
        path.append(parameters(model))
    return path


@pytest.mark.parametrize("step", [1, 3])
def test_a_bad_gradient_skips_one_ranks_step_and_no_merge(step: int) -> None:
    """In the middle of a period, and in the step that ends with a merge."""
    with heard(events.Skipped) as skipped:
        paths = cluster(lambda w: poisoned(w, "LocalSGD(4) + TopK(0.3)", 9, lambda s, r: (s, r) == (step, 1)), 3)
    clean = cluster(lambda w: poisoned(w, "LocalSGD(4) + TopK(0.3)", 9, lambda s, r: False), 3)
    assert [event.rank for event in skipped] == [1]
    assert skipped[0].tensor in dict(network().named_parameters())
    if step == 1:
        assert torch.equal(paths[1][1], paths[1][0]), "a step was made with a gradient that is not finite"
    for rank in (0, 2):
        for before in range(3):
            assert torch.equal(paths[rank][before], clean[rank][before]), "others noticed what is local"
    for merge in (3, 7):
        together = agree([path[merge] for path in paths])
        assert torch.isfinite(together).all()
        assert not torch.equal(together, clean[0][merge])
    assert spread([path[8] for path in paths]) > 0


@pytest.mark.parametrize("recipe", ["LocalSGD(8)", "LocalSGD(1)", "DelayedAveraging(2)"])
def test_five_bad_gradients_in_a_row_end_the_run(recipe: str) -> None:
    with pytest.raises(NonFiniteError, match=r'5 steps in a row.*"\d\.(weight|bias)" on rank 1'):
        cluster(lambda worker: poisoned(worker, recipe, 12, lambda s, r: s > 1 and r == 1), 2)


def test_bad_gradients_now_and_then_do_not_end_it() -> None:
    for path in cluster(lambda worker: poisoned(worker, "LocalSGD(20)", 15, lambda s, r: s % 2 == 0 and r == 1), 2):
        assert torch.isfinite(path[-1]).all()


@pytest.mark.parametrize("step", [1, 3])
def test_an_overflow_on_one_rank_is_local(step: int) -> None:
    """A GradScaler lowers that rank's scale and skips its step; sync rounds stay where they are; no rank hears it."""

    def work(worker: Worker, overflows: bool) -> tuple[list[Tensor], float, int]:
        model = network(worker.rank, torch.float32)
        optimizer = sgd(momentum=0.9)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        session = worker.attach(model, optimizer, "LocalSGD(4)", scaler=scaler)
        path = []
        for t in range(9):
            optimizer.zero_grad()
            inputs, targets = batch(t, worker.rank, dtype=torch.float32)
            bad = overflows and (t, worker.rank) == (step, 1)
            scaler.scale(mse_loss(model(inputs), targets) * (math.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            path.append(parameters(model))
        return path, scaler.get_scale(), session.steps

    results = cluster(lambda worker: work(worker, True), 3)
    clean = cluster(lambda worker: work(worker, False), 3)
    assert [scale for _, scale, _ in results] == [256.0, 128.0, 256.0]
    assert {steps for *_, steps in (*results, *clean)} == {9}
    for rank in (0, 2):
        for before in range(3):
            assert torch.equal(results[rank][0][before], clean[rank][0][before])
    assert torch.equal(results[0][0][3], results[2][0][3])
    together = agree([path[7] for path, *_ in results])
    assert torch.isfinite(together).all()


# -- parameters --------------------------------------------------------------------------------------------------------


def remembered(session: Session) -> Tensor:
    parts = [tensor.flatten() for kept in session.state_dict()["state"].values() for tensor in kept.values()]
    return torch.cat(parts).clone()


def spoilt(worker: Worker, recipe: str, number: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(memory before and after a step, merged parameters). A parameter of rank 1 is `number` during step 5 only."""
    model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
    session.set_batch_weight([1, 2, 5][worker.rank])
    first = next(model.parameters()).detach()
    seen = []
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        kept, before = first.clone(), remembered(session)
        if (step, worker.rank) == (5, 1):
            first[0, 0] = number
        optimizer.step()
        if (step, worker.rank) == (5, 1):
            assert not abs(float(first[0, 0])) < 1e5, "a merge took place"
            first.copy_(kept)
        with session.averaged_parameters(model):
            seen.append((before, remembered(session), parameters(model)))
    return seen


def check_spoilt(recipe: str, number: float, first_nonfinite: int | None, tolerance: float = 0.0) -> None:
    """Nobody remembers anything of it, who is to blame is named, and the next merge makes up for it."""
    with heard(events.Skipped) as skipped:
        results = cluster(lambda worker: spoilt(worker, recipe, number), 3)
    assert {(event.rank, event.tensor) for event in skipped} == {(first_nonfinite, "0.weight")}
    for seen in results:
        before, after, merged = seen[5]
        assert (before - after).abs().max() <= tolerance, "a merge that was skipped is remembered"
        assert torch.equal(merged, seen[4][2])
        assert not torch.equal(seen[8][2], merged), "nothing was merged any more"
    for step in range(9):
        assert torch.isfinite(agree([seen[step][2] for seen in results])).all()


@pytest.mark.parametrize("recipe", ["LocalSGD(3) + TopK(0.2)", "DiLoCo(3) + Int8()"])
def test_parameters_gone_bad_are_not_merged(recipe: str) -> None:
    check_spoilt(recipe, math.nan, 1)


@pytest.mark.parametrize("recipe", ["LocalSGD(3)", "DelayedAveraging(0, period=3)"])
def test_differences_beyond_half_precision_are_not_merged(recipe: str) -> None:
    """What was offered is offered again: to rounding where it had been taken out of what is remembered."""
    check_spoilt(recipe + " + Dense(dtype='float16')", 1e6, None, 1e-8 if recipe.startswith("Delayed") else 0.0)


def test_the_check_catches_what_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayedAveraging, "undo", lambda self, memory, offered: None)
    with pytest.raises(AssertionError, match="is remembered"):
        test_differences_beyond_half_precision_are_not_merged("DelayedAveraging(0, period=3)")
