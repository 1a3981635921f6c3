"""Parameter averaging on uneven data: workers run out of it together, and weigh what they had."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.nightly import nightly
from support.training_loops import LR, START, agree, close, gradient, mean_of, sgd
from support.virtual_workers import Worker, batch, cluster, loss_of, network, parameters, train_step
from torch import Tensor
from torch.nn.functional import mse_loss


def uneven(worker: Worker, recipe: str, batches: Sequence[int], epochs: int = 2) -> tuple[Tensor, Tensor, int]:
    """(merged parameters, own parameters, clock) after epochs of which each rank has another number of batches."""
    model = network(worker.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = worker.attach(model, optimizer, recipe)
    for epoch in range(epochs):
        with session.epoch():
            for step in range(batches[worker.rank]):
                train_step(model, optimizer, 100 * epoch + step, worker.rank)
    with session.averaged_parameters(model):
        merged = parameters(model)
    return merged, parameters(model), session.steps


def check_uneven(recipe: str, batches: Sequence[int]) -> list[tuple[Tensor, Tensor, int]]:
    results = cluster(lambda worker: uneven(worker, recipe, batches), len(batches))
    merged = agree([merged for merged, *_ in results])
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, START)
    assert len({clock for *_, clock in results}) == 1, "the clocks differ"
    return results


@pytest.mark.parametrize("batches", [(8, 4, 8), (7, 0, 3)], ids=str)
@pytest.mark.parametrize(
    "recipe",
    [
        "LocalSGD(3) + TopK(0.2)",
        "LocalSGD(3, optimizer_state='average')",
        "PostLocalSGD(3, start=2)",
        "DiLoCo(4, fragments=2, delay=2, mix=0.5) + Int8()",
        "DelayedAveraging(2)",
        "DelayedAveraging(2, period=3) + TopK(0.2)",
    ],
)
def test_ranks_run_out_of_data_at_different_times(recipe: str, batches: Sequence[int]) -> None:
    check_uneven(recipe, batches)


def test_ranks_run_out_of_data_while_gradients_travel() -> None:
    for recipe in ("EveryStep(delay=1)", "EveryStep(delay=2) + TopK(0.2)", "EveryStep(accumulate=3)"):
        results = check_uneven(recipe, (7, 4, 7))
        agree([own for _, own, _ in results])


def test_sites_run_out_of_data() -> None:
    for batches in ((6, 3, 6, 6), (7, 3, 7, 7), (6, 6, 2, 3), (7, 7, 0, 0)):
        results = check_uneven("LocalSGD(2, per_site=2)", batches)
        for site in ((0, 1), (2, 3)):
            agree([results[rank][1] for rank in site])


@pytest.mark.parametrize("recipe", ["LocalSGD(4)", "DiLoCo(4, outer_learning_rate=1, outer_momentum=0)"])
def test_merges_weigh_workers_by_their_samples(recipe: str) -> None:
    """By all that were seen since the last merge."""
    sizes = [[5, 3, 1], [2, 2, 7], [1, 4, 4], [3, 1, 1]]

    def work(worker: Worker) -> list[Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
        path = []
        for step in range(8):
            optimizer.zero_grad()
            size = sizes[step % 4][worker.rank]
            session.set_batch_weight(size)
            inputs, targets = batch(step, worker.rank, size)
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            path.append(parameters(model))
        return path

    xs = [START] * 3
    weights = [float(sum(row[rank] for row in sizes)) for rank in range(3)]
    paths = cluster(work, 3)
    for step in range(8):
        xs = [x - LR * gradient(x, step, rank, sizes[step % 4][rank]) for rank, x in enumerate(xs)]
        if step % 4 == 3:
            merged = sum(weight * x for weight, x in zip(weights, xs, strict=True)) / sum(weights)
            assert not torch.allclose(merged, mean_of(xs)), "the weights make no difference here"
            xs = [merged] * 3
        for path, x in zip(paths, xs, strict=True):
            close(path[step], x)


def test_steps_of_all_workers_count_alike_where_they_are_taken_back() -> None:
    """Delayed averages: with everything landed, all hold the mean of what they did, whatever their batches weigh."""
    weights = [1.0, 2.0, 5.0]

    def work(worker: Worker) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "DelayedAveraging(2, period=2)")
        session.set_batch_weight(weights[worker.rank])
        path, gradients = [], []
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            optimizer.step()
            path.append(parameters(model))
        return path, gradients

    results = cluster(work, 3)
    for made in range(1, 10):
        landed = max(0, (made - 2) // 2 * 2)
        together = START.clone()
        for step in range(landed):
            together -= LR * sum(own[step] for _, own in results) / 3
        for path, own in results:
            close(path[made - 1], together - LR * sum(own[step] for step in range(landed, made)))


@pytest.mark.parametrize("weights", [(0.0, 1.0, 1.0), *nightly(((32.0, 32.0, 4.0),))])
def test_changing_batch_weights_lose_no_residual(weights: tuple[float, float, float]) -> None:
    """What a worker keeps to itself is its residual and what is in flight, however long it goes on."""

    def work(worker: Worker) -> list[float]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "DelayedAveraging(1) + TopK(0.3)")
        apart = []
        for step in range(160):
            session.set_batch_weight(weights[(step + worker.rank) % 3] if step % 20 == 19 else 32.0)
            optimizer.zero_grad()
            quiet = step % 80 >= 40  # nothing new is computed: what was owed is sent
            mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).mul(not quiet).backward()
            optimizer.step()
            if step % 80 == 79:
                mine = parameters(model)
                with session.averaged_parameters(model):
                    apart.append(float((parameters(model) - mine).norm()))
        return apart

    assert max(map(max, cluster(work, 3))) < 1e-9
