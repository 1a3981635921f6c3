"""Whole step: what arrives is Adam's step, of moments that each worker keeps for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam_training import (
    BETAS,
    EPS,
    LR,
    WORLD,
    Adam,
    adam,
    by_torch,
    close,
    everywhere,
    matrices,
    schedule,
    together,
    unused_rows,
)
from support.virtual_workers import Worker, agree, batch, cluster, joined, loss_of, parameters
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.errors import AttachError
from gossamer.train.moments.transfer import WholeStep

ALL = "AdamUpdate(inner=Dense())"


def mean_of_updates(cycle: bool, *, second: float = BETAS[1]) -> Tensor:
    """One process with the moments of all workers: AdamW by the mean of what each of them would do alone."""
    model = matrices(0)
    optimizer = adam(model)
    moments = {(p, rank, key): torch.zeros_like(p) for p in model.parameters() for rank in range(WORLD) for key in "mv"}
    for step in range(10):
        if cycle:
            schedule(optimizer, step)
        gradients = [torch.autograd.grad(loss_of(model, step, rank), list(model.parameters())) for rank in range(WORLD)]
        with torch.no_grad():
            for number, (p, group) in enumerate(zip(model.parameters(), optimizer.param_groups, strict=True)):
                first, total = group["betas"][0], torch.zeros_like(p)
                for rank in range(WORLD):
                    m, v, g = moments[p, rank, "m"], moments[p, rank, "v"], gradients[rank][number]
                    m.copy_(first * m + (1 - first) * g)
                    v.copy_(second * v + (1 - second) * g * g)
                    total += m / (1 - first ** (step + 1)) / ((v / (1 - second ** (step + 1))).sqrt() + EPS)
                p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * total / WORLD)
    return parameters(model)


@pytest.mark.parametrize("cycle", [False, True])
def test_sending_all_is_the_mean_of_what_each_would_do(cycle: bool) -> None:
    close(together(ALL, cycle=cycle), mean_of_updates(cycle))


def test_it_is_not_adam_of_the_mean() -> None:
    with pytest.raises(AssertionError):
        close(together(ALL), by_torch())


def same_data(term: str, **options: Any) -> Tensor:
    """Three workers who see the same: each has the gradient of the mean."""

    def work(worker: Worker) -> Tensor:
        model = matrices(worker.rank)
        optimizer = adam(model, **options)
        worker.attach(model, optimizer, everywhere(term))
        for step in range(10):
            schedule(optimizer, step)
            optimizer.zero_grad()
            inputs, targets = joined(batch(step, rank) for rank in range(WORLD))
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return parameters(model)

    return agree(cluster(work, WORLD))


def test_with_equal_gradients_it_is_adamw() -> None:
    close(same_data(ALL), by_torch(cycle=True))


def test_betas_that_are_read_once_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = WholeStep.read
    monkeypatch.setattr(WholeStep, "read", lambda self, group: first(self, group | {"betas": BETAS}))
    with pytest.raises(AssertionError):
        close(same_data(ALL), by_torch(cycle=True))


def test_a_decay_that_travels_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WholeStep.step
    monkeypatch.setattr(
        WholeStep, "step", lambda self, group, owned: honest(self, group | {"weight_decay": 0.0}, owned)
    )
    with pytest.raises(AssertionError):
        close(same_data(ALL), by_torch(cycle=True))


def test_the_optimizer_keeps_no_moments() -> None:
    def work(worker: Worker) -> None:
        model = matrices(0)
        optimizer = adam(model)
        session = worker.attach(model, optimizer, everywhere("AdamUpdate(inner=TopK(density=0.1))"))
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        assert not any(optimizer.state.values())
        kept = session.state_dict()["state"]["0.weight"]
        assert {key.rpartition(".")[2] for key in kept} == {"momentum", "variance", "residual"}

    cluster(work, 2)


def drift_of_unused_rows(term: str) -> float:
    """How far they went, in steps of their learning rate."""
    before, after, _ = unused_rows(term)
    return float((after - before).abs().max()) / (2 * LR)


def test_rows_that_nobody_used_come_back() -> None:
    """Signs make noise of their zeros, and feedback takes it back."""
    assert 0 < drift_of_unused_rows("AdamUpdate(OneBit(block=2048))") < 1
    assert drift_of_unused_rows("AdamUpdate(OneBit(block=2048, feedback=False))") > 1  # the twin


def uneven_epsilon(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    optimizer.param_groups[0]["eps"] = 1e-3
    return optimizer


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda m: adam(m, Adam), r"weight_decay=0\.1 of Adam.*torch\.optim\.AdamW\(model\.parameters\(\)"),
        (uneven_epsilon, "different momenta, .*epsilon=1e-06.*epsilon=0.001"),
        (lambda m: adam(m, amsgrad=True), "amsgrad=True"),
        (lambda m: adam(m, maximize=True), "maximize=True"),
        (lambda m: torch.optim.SGD(m.parameters()), r"torch\.optim\.Adam\(model\.parameters\(\)"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(make: Any, wrong: str) -> None:
    def work(worker: Worker) -> None:
        model = matrices(0)
        worker.attach(model, make(model), everywhere(ALL))

    with pytest.raises(AttachError, match=wrong):
        cluster(work, 2)
