"""Ranks of a session that differ: in data, in weights, and where they must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sessions import sgd, train
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
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

from gossamer.errors import LoopError, MismatchError

# -- uneven data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)"])
def test_ranks_run_out_of_data_at_different_times(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, int, Tensor]:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        session = worker.attach(model, optimizer, recipe)
        for epoch in range(2):
            with session.epoch():
                for step in range([5, 2, 0][worker.rank]):
                    loss_of(model, 100 * epoch + step, worker.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        moments = [state["exp_avg"].flatten() for state in optimizer.state.values()]
        return parameters(model), session.steps, torch.cat(moments)

    results = cluster(work, 3)
    agree([ended for ended, *_ in results])
    agree([moments for *_, moments in results])
    assert {steps for _, steps, _ in results} == {10}


def test_statistics_are_those_of_the_first_rank_with_data() -> None:
    batches = [2, 5, 4]

    def normed() -> nn.Sequential:
        with seeded(0):
            return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def work(worker: Worker) -> Tensor:
        model = normed()
        optimizer = sgd(model, lr=0.0)
        session = worker.attach(model, optimizer)
        with session.epoch():
            for step in range(batches[worker.rank]):
                optimizer.zero_grad()
                loss_of(model, step, worker.rank).backward()
                optimizer.step()
        return torch.cat([buffer.double().flatten() for buffer in model.buffers()])

    expected = normed()
    for step in range(max(batches)):
        first = next(rank for rank, count in enumerate(batches) if step < count)
        loss_of(expected, step, first)
    means = torch.cat([buffer.double().flatten() for buffer in expected.buffers()])
    assert torch.equal(agree(cluster(work, 3)), means)


def test_saving_within_an_epoch(tmp_path: Path) -> None:
    def work(worker: Worker, batches: int) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.3)")
        with session.epoch():
            for step in range(batches):
                train_step(model, optimizer, step, worker.rank)
                if step == 2:
                    session.save(tmp_path)
        return parameters(model)

    saved = agree(cluster(lambda worker: work(worker, 4), 3))
    assert torch.equal(saved, cluster(lambda worker: train(worker, "TopK(0.3)", 4), 3)[0])
    with pytest.raises(LoopError, match=r"call session\.save.* ranks 0, 1 called it.*drop_last"):
        cluster(lambda worker: work(worker, 2 if worker.rank == 2 else 4), 3)


def test_weights_make_uneven_batches_one_batch() -> None:
    sizes = [5, 3, 1]

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank, sizes[(worker.rank + step) % 3])
            session.set_batch_weight(len(inputs))
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return parameters(model)

    expected = trained_alone(sgd, 4, lambda step: [batch(step, rank, sizes[(rank + step) % 3]) for rank in range(3)])
    torch.testing.assert_close(agree(cluster(work, 3)), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "LocalSGD(period=2)", "EveryStep(delay=1)", "DiLoCo(2)"])
@pytest.mark.parametrize("since", [0, 3])
def test_a_weight_that_one_rank_alone_says_is_found(recipe: str, since: int) -> None:
    def work(worker: Worker, everyone: bool) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        for step in range(6):
            optimizer.zero_grad()
            if step >= since and (everyone or worker.rank == 1):
                session.set_batch_weight(8)
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(lambda worker: work(worker, True), 3))
    with pytest.raises(
        MismatchError, match=r"not called' on ranks 0, 2.*called' on rank 1.*on every rank, or on no rank"
    ):
        cluster(lambda worker: work(worker, False), 3)


def test_equal_weights_change_no_bit() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.2)")
        for step in range(4):
            optimizer.zero_grad()
            session.set_batch_weight(7)
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(cluster(work, 3)[0], cluster(lambda worker: train(worker, "TopK(0.2)", 4), 3)[0])


# -- ranks that are not alike ------------------------------------------------------------------------------------------


def test_optimizer_state_on_one_rank_only_is_found() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        if worker.rank == 0:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        worker.attach(model, optimizer)

    with pytest.raises(MismatchError, match=r"optimizer.*on rank 0.*on rank"):
        cluster(work, 3)


def test_other_recipe_layout_and_learning_rate_are_found() -> None:
    with pytest.raises(MismatchError, match=r"TopK.*rank 1|rank 1.*TopK"):
        cluster(lambda worker: train(worker, "TopK(0.1)" if worker.rank == 1 else "Dense()", 1), 2)

    def wider(worker: Worker) -> None:
        model = nn.Linear(6, 3 + worker.rank)
        worker.attach(model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(MismatchError, match=r"layout|names, shapes"):
        cluster(wider, 2)

    def hotter(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(3):
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5 if worker.rank == 1 and step == 1 else 1.0

    with pytest.raises(MismatchError, match=r"lr=0\.1.*rank 0.*lr=0\.05.*rank 1"):
        cluster(hotter, 2)


@pytest.mark.parametrize("equal", [True, False])
def test_equal_first_batches_are_noticed(equal: bool) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd)
        loss_of(model, 0, 0 if equal else worker.rank).backward()

    with notices() as said:
        cluster(work, 2)
    assert len(said) == equal
    assert all("world.shard" in message for message in said)
