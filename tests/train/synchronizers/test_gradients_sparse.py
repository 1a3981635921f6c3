"""Sparse gradients of embeddings: what one process would have with all batches, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, agree, cluster, heard, parameters
from torch import Tensor, nn
from torch.optim import SGD, Adam, SparseAdam

from gossamer import events
from gossamer.errors import LoopError
from gossamer.train.engine.sparse_gradients import Rows
from gossamer.train.engine.step_decision import control_bytes

WORLD, STEPS, ROWS, WIDTH = 2, 3, 20, 4


class Tables(nn.Module):
    """Integers everywhere, so that sums are exact."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        draw = torch.Generator().manual_seed(0)  # its own: other threads' layers draw from torch's
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.0).data += torch.randint(-3, 4, parameter.shape, generator=draw)
        self.double()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.words(numbers).sum(1) * self.bags(numbers)


class Mixed(Tables):
    """A dense layer beside the tables."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__(sparse)
        self.head = nn.Linear(WIDTH, 2).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.arange(2.0 * WIDTH).view(2, WIDTH))
            self.head.bias.fill_(1.0)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(super().forward(numbers))


def numbers(step: int, rank: int) -> Tensor:
    """Some of them several times."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS // 2, (2, 3), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.5)


Batches = Callable[[int], list[Tensor]]  # of all ranks, by step


def alone(model: nn.Module, batches: Batches) -> Tensor:
    """One process, on the mean loss of all samples."""
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat(batches(step))).sum(1).mean().backward()
        optimizer.step()
    return parameters(model)


def each(step: int) -> list[Tensor]:
    return [numbers(step, rank) for rank in range(WORLD)]


def train(worker: Worker, make: type[Tables], recipe: str = "Dense()", **options: Any) -> Tensor:
    model, optimizer, session = worker.start(make(), sgd, recipe, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(numbers(step, worker.rank)).sum(1).mean().backward()
        assert all(p.grad is not None and p.grad.is_sparse for p in (model.words.weight, model.bags.weight))
        optimizer.step()
    assert session.steps == STEPS
    return parameters(model)


@pytest.mark.parametrize("recipe", ["Dense()", "Dense(dtype='bfloat16')", "TopK(0.1)", "PowerSGD(rank=2)"])
def test_a_model_of_tables_alone_is_trained_exactly_by_any_recipe(recipe: str) -> None:
    assert torch.equal(agree(cluster(lambda worker: train(worker, Tables, recipe), WORLD)), alone(Tables(), each))


def test_tables_next_to_dense_layers() -> None:
    assert torch.equal(agree(cluster(lambda worker: train(worker, Mixed), WORLD)), alone(Mixed(), each))
    agree(cluster(lambda worker: train(worker, Mixed, "TopK(0.3)"), WORLD))


def test_one_worker_is_plain_training() -> None:
    (found,) = cluster(lambda worker: train(worker, Mixed), 1)
    assert torch.equal(found, alone(Mixed(), lambda step: [numbers(step, 0)]))


def test_batches_count_by_their_weight() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(Mixed(), sgd)
        for step in range(STEPS):
            optimizer.zero_grad()
            session.set_batch_weight(1 + 2 * worker.rank)
            model(numbers(step, worker.rank)).sum(1).mean().backward()
            optimizer.step()
        return parameters(model)

    def batches(step: int) -> list[Tensor]:
        return [numbers(step, 0), *(3 * [numbers(step, 1)])]

    assert torch.equal(agree(cluster(work, WORLD)), alone(Mixed(), batches))


def test_the_check_catches_a_weight_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "scaled", lambda self, factor: self)
    with pytest.raises(AssertionError):
        test_batches_count_by_their_weight()


def test_uneven_inputs() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(Mixed(), sgd)
        with session.epoch():
            for step in range(STEPS - 2 * worker.rank):
                optimizer.zero_grad()
                model(numbers(step, worker.rank)).sum(1).mean().backward()
                optimizer.step()
        return parameters(model)

    def batches(step: int) -> list[Tensor]:
        return each(step) if step == 0 else [numbers(step, 0)]

    assert torch.equal(agree(cluster(work, WORLD)), alone(Mixed(), batches))


def test_gradients_that_add_up_before() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(Mixed(), sgd)
        for step in range(STEPS):
            optimizer.zero_grad()
            with session.no_sync():
                (model(numbers(10 + step, worker.rank)).sum(1).mean() / 2).backward()
            (model(numbers(step, worker.rank)).sum(1).mean() / 2).backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(agree(cluster(work, WORLD)), alone(Mixed(), lambda step: [*each(step), *each(10 + step)]))


def test_a_table_that_some_or_no_rank_uses() -> None:
    def work(worker: Worker) -> tuple[Tensor, bool]:
        model, optimizer, _ = worker.start(Tables(), sgd)
        used = model.words if worker.rank else model.bags
        used(numbers(0, 0)).sum().backward()
        both = all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        model.words(numbers(1, worker.rank)).sum().backward()
        assert model.bags.weight.grad is None
        optimizer.step()
        return parameters(model), both

    found = cluster(work, WORLD)
    agree([ended for ended, _ in found])
    assert all(both for _, both in found)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_with_numbers_that_are_not_finite_is_left_out(scaled: bool) -> None:
    def work(worker: Worker) -> Tensor:
        model = Mixed()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, enabled=scaled)
        session = worker.attach(model, optimizer, scaler=scaler if scaled else None)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(numbers(step, worker.rank)).sum(1).mean()
            if step == 1 and worker.rank == 0:
                loss = loss + model.bags(numbers(0, 0)).sum() * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert session.steps == STEPS - 1
        return parameters(model)

    with heard(events.Skipped) as skipped:
        found = agree(cluster(work, WORLD))
    assert {(each.rank, each.tensor, each.step) for each in skipped} == {(0, "bags.weight", 1)}
    assert torch.isfinite(found).all()


def test_clipping_is_that_of_the_same_gradients_laid_out_densely() -> None:
    def work(worker: Worker, sparse: bool) -> Tensor:
        model = Mixed(sparse)
        model, optimizer, _ = worker.start(model, sgd, clip_norm=0.01)
        model(numbers(0, worker.rank)).sum(1).mean().backward()
        optimizer.step()
        return torch.cat([p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None])

    for world in (1, WORLD):
        rows = agree(cluster(lambda worker: work(worker, True), world))
        torch.testing.assert_close(rows, cluster(lambda worker: work(worker, False), world)[0], atol=0, rtol=1e-14)
        assert float(rows.norm()) == pytest.approx(0.01, rel=1e-3)


def test_two_optimizers_of_which_one_takes_nothing_but_rows() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model = Mixed()
        optimizer = SparseAdam([model.words.weight, model.bags.weight], lr=0.1)
        rest = Adam(model.head.parameters(), lr=0.1)
        worker.attach(model, rest)
        for step in range(STEPS):
            for each in (optimizer, rest):
                each.zero_grad()
            model(numbers(step, worker.rank)).sum(1).mean().backward()
            for each in (optimizer, rest):
                each.step()
        return parameters(model), model.words.weight.detach()[ROWS // 2 :].clone()

    found = cluster(work, WORLD)
    agree([ended for ended, _ in found])
    assert torch.equal(found[0][1], Mixed().words.weight.detach()[ROWS // 2 :]), "rows that nobody used have moved"


def test_bytes_are_counted() -> None:
    """Two tables' rows of 4 + 8 WIDTH bytes, as many as the rank with the most distinct ones has."""

    def work(worker: Worker) -> float:
        with heard(events.StepEnded) as ended:
            train(worker, Tables)
        return float(ended[-1].bytes_sent)

    most = max(len(numbers(STEPS - 1, rank).unique()) for rank in range(WORLD))
    rows = 2 * most * (4 + 8 * WIDTH)
    assert cluster(work, WORLD) == [rows + 2 * 8 + control_bytes(2)] * WORLD


def test_saving_between_backward_and_step_keeps_rows(tmp_path: Path) -> None:
    def work(worker: Worker, save: bool) -> Tensor:
        model, optimizer, session = worker.start(Mixed(), sgd)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(numbers(step, worker.rank)).sum(1).mean().backward()
            if save:
                session.save(tmp_path)
            optimizer.step()
        return parameters(model)

    assert torch.equal(agree(cluster(lambda w: work(w, True), WORLD)), cluster(lambda w: work(w, False), WORLD)[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_pass_is_no_step(set_to_none: bool) -> None:
    def work(worker: Worker) -> tuple[Tensor, int]:
        model, optimizer, session = worker.start(Tables(), sgd)
        for step in range(STEPS):
            model(numbers(50 + step, worker.rank)).sum(1).mean().backward()
            optimizer.zero_grad(set_to_none)
            model(numbers(step, worker.rank)).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return parameters(model), session.steps

    found = cluster(work, WORLD)
    assert torch.equal(agree([ended for ended, _ in found]), alone(Tables(), each))
    assert {steps for _, steps in found} == {STEPS}


@pytest.mark.parametrize("recipe", ["LocalSGD(2)", "DiLoCo(2)", "LocalSGD(2, per_site=2)", "Gossip() + Ring()"])
def test_where_parameters_are_averaged_rows_stay_here(recipe: str) -> None:
    """As with dense gradients, but for the order in which a row's are added up; within a site rows are averaged."""

    def work(worker: Worker, sparse: bool) -> Tensor:
        model, optimizer, session = worker.start(Mixed(sparse), sgd, recipe)
        for step in range(4):
            optimizer.zero_grad()
            model(numbers(step, worker.rank)).sum(1).mean().backward()
            optimizer.step()
        assert session.steps
        return parameters(model)

    rows, dense = (cluster(lambda worker, sparse=sparse: work(worker, sparse), 4) for sparse in (True, False))
    for a, b in zip(rows, dense, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=1e-12)


def test_unannounced_sparse_gradient_is_refused() -> None:
    def work(worker: Worker, says: bool) -> Tensor:
        model: Any = nn.Module()
        model.inner = nn.Module()
        model.inner.table = nn.Parameter(torch.zeros(ROWS, WIDTH))
        model.inner.sparse = says
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        nn.functional.embedding(numbers(0, worker.rank), model.inner.table, sparse=True).sum().backward()
        optimizer.step()
        return parameters(model)

    with pytest.raises(LoopError, match=r'"inner.table" has a sparse gradient.*model\.inner\.sparse = True'):
        cluster(lambda worker: work(worker, False), WORLD)
    agree(cluster(lambda worker: work(worker, True), WORLD))
