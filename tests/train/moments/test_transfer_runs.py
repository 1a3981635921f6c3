"""Momentum transfer in runs: skipped steps, resumed and uneven ones, models that change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.momentum_training import ALL, MIXED, REAL, close, one_cycle, sgd
from support.session_laws import check_a_bad_gradient_changes_nothing, check_the_loss_scale_does_not_show
from support.virtual_workers import Worker, agree, batch, cluster, grow, network, parameters, train_step
from torch import Tensor, nn


@pytest.mark.parametrize("recipe", REAL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_changes_nothing_anywhere(recipe: str, value: float) -> None:
    check_a_bad_gradient_changes_nothing(sgd, recipe, 2, value)


@pytest.mark.parametrize("recipe", REAL)
def test_the_loss_scale_does_not_show(recipe: str) -> None:
    check_the_loss_scale_does_not_show(sgd, recipe)


@pytest.mark.parametrize("recipe", REAL)
@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_has_the_same_bits(recipe: str, stop: int, tmp_path: Path) -> None:
    def work(worker: Worker, steps: int) -> Tensor:
        model = network(worker.rank)
        optimizer = sgd(model, nesterov=True)
        scheduler = one_cycle(optimizer)
        session = worker.attach(model, optimizer, recipe)
        mine = session.load(tmp_path)
        if mine:
            scheduler.load_state_dict(mine["scheduler"])
        for step in range(session.steps, steps):
            train_step(model, optimizer, step, worker.rank)
            scheduler.step()
        if steps == stop:
            session.save(tmp_path, scheduler=scheduler.state_dict())
        return parameters(model)

    whole = agree(cluster(lambda worker: work(worker, 8), 3))
    half = agree(cluster(lambda worker: work(worker, stop), 3))
    assert not torch.equal(half, whole)
    assert torch.equal(agree(cluster(lambda worker: work(worker, 8), 3)), whole)


@pytest.mark.parametrize("recipe", [*REAL, MIXED])
def test_ranks_that_run_out_of_data_agree_in_the_end(recipe: str) -> None:
    """Their schedulers stand still meanwhile, so their momentum is old."""

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        for epoch in range(2):
            with session.epoch():
                for step in range([5, 2, 1][worker.rank]):
                    optimizer.param_groups[0]["momentum"] = optimizer.param_groups[1]["momentum"] = 0.9 - 0.1 * step
                    train_step(model, optimizer, 10 * epoch + step, worker.rank)
        return parameters(model)

    agree(cluster(work, 3))


def test_parameters_that_nobody_used_stand_still() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model, weight_decay=0.1)
        worker.attach(model, optimizer, ALL)
        for step in range(4):
            optimizer.zero_grad()
            inputs, _ = batch(step, worker.rank)
            used = model if step % 2 else model[:2]
            before = parameters(model[2:])
            used(inputs).square().mean().backward()
            optimizer.step()
            assert torch.equal(parameters(model[2:]), before) == (step % 2 == 0)
        return parameters(model)

    ended = agree(cluster(work, 2))
    model = network(0)
    assert isinstance(model, nn.Sequential)
    optimizer = sgd(model, weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.cat([batch(step, rank)[0] for rank in range(2)])
        (model if step % 2 else model[:2])(inputs).square().mean().backward()
        optimizer.step()
    close(ended, parameters(model))


def test_resizing_keeps_the_momentum_of_the_others() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "Route(DGC(density=0.2), smallest=0)")
        for step in range(4):
            if step == 2:
                grow(model[4])
                optimizer.param_groups[1]["params"] = list(model.parameters())[1:]
                kept = {key: t.clone() for key, t in session.state_dict()["state"]["2.weight"].items()}
                session.reset_compressor_state("4.weight", "4.bias")
                now = session.state_dict()["state"]["2.weight"]
                assert all(torch.equal(now[key], kept[key]) for key in kept)
            optimizer.zero_grad()
            model(batch(step, worker.rank)[0]).square().mean().backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(work, 2))
