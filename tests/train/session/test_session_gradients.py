"""Gradients in sessions: missing on some ranks, accumulated over several passes, and thrown away."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    loss_of,
    network,
    parameters,
    seeded,
    trained_alone,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.errors import LoopError

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
