"""Synchronous gradients in every step, accumulated over several passes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.training_loops import LR, START, agree, close, run, sgd
from support.virtual_workers import (
    Batch,
    Worker,
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

from gossamer.algorithms.strategies import EveryStep
from gossamer.train.engine.bucket import BucketInput, GradientAccumulator, assign_buckets
from gossamer.train.session.session import Session

Loop = Callable[[nn.Module, torch.optim.Optimizer, Session, Callable[[int], Tensor]], None]
K, EXCHANGES = 3, 3
WORLD = 3


def every_batch(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, loss: Any) -> None:
    for step in range(K * EXCHANGES):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def every_batch_with_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, loss: Any) -> None:
    for step in range(K * EXCHANGES):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def classical(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, loss: Any) -> None:
    for step in range(K * EXCHANGES):
        loss(step).backward()
        if (step + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


def muted(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, loss: Any) -> None:
    """Each pass that counts is the mean of two that were summed on this rank."""
    for step in range(K * EXCHANGES):
        optimizer.zero_grad()
        with session.no_sync():
            (loss(step) / 2).backward()
        (loss(step) / 2).backward()
        optimizer.step()


LOOPS: list[Loop] = [every_batch, every_batch_with_zeros, classical, muted]


def accumulated(worker: Worker, recipe: Any, loop: Loop, sizes: Sequence[int]) -> Tensor:
    model, optimizer, session = worker.start(network(worker.rank), sgd(momentum=0.9), recipe)

    def loss(step: int) -> Tensor:
        size = sizes[(step + worker.rank) % len(sizes)]
        inputs, targets = batch(step, worker.rank, size)
        if len(sizes) > 1:
            session.set_batch_weight(size)
        return mse_loss(model(inputs), targets)

    loop(model, optimizer, session, loss)
    assert session.steps == EXCHANGES
    return parameters(model)


def big_batches(sizes: Sequence[int]) -> Tensor:
    """One process on the batches of all workers and passes at once."""

    def batches(exchange: int) -> list[Batch]:
        places = [(step, rank) for step in range(K * exchange, K * exchange + K) for rank in range(WORLD)]
        return [batch(step, rank, sizes[(step + rank) % len(sizes)]) for step, rank in places]

    return trained_alone(sgd(momentum=0.9), EXCHANGES, batches)


def check_big_batch(loop: Loop, sizes: Sequence[int]) -> None:
    ours = agree(cluster(lambda worker: accumulated(worker, EveryStep(accumulate=K), loop, sizes), WORLD))
    close(ours, big_batches(sizes))


@pytest.mark.parametrize("sizes", [(4,), (5, 1, 3, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_several_passes_are_one_big_batch(loop: Loop, sizes: Sequence[int]) -> None:
    check_big_batch(loop, sizes)


def test_the_check_catches_a_missing_division(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradientAccumulator.join

    def undivided(self: GradientAccumulator, place: int, pairs: Any, weight: float, scale: float) -> BucketInput:
        fresh = honest(self, place, pairs, weight, scale)
        return BucketInput(fresh.pairs, 1.0, fresh.sums, scale)

    monkeypatch.setattr(GradientAccumulator, "join", undivided)
    with pytest.raises(AssertionError, match="not close"):
        check_big_batch(every_batch, (4,))


def test_several_buckets_accumulate_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cluster(lambda worker: accumulated(worker, EveryStep(accumulate=K), every_batch, (4,)), WORLD)
    monkeypatch.setattr("gossamer.train.synchronizers.stages.assign_buckets", partial(assign_buckets, bucket_bytes=1))
    parts = cluster(lambda worker: accumulated(worker, EveryStep(accumulate=K), every_batch, (4,)), WORLD)
    assert torch.equal(agree(whole), agree(parts))


@pytest.mark.parametrize("compressor", ["TopK(0.2)", "Int8()", "PowerSGD(2)", "DGC(density=0.2)"])
def test_the_sum_is_what_is_compressed(compressor: str) -> None:
    """The same bits as summing on each rank first, where the weights are powers of two."""

    def by_hand(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(worker.rank), sgd(momentum=0.9), compressor)
        for step in range(0, 8, 2):
            optimizer.zero_grad()
            for each in (step, step + 1):
                inputs, targets = batch(each, worker.rank)
                with session.no_sync() if each == step else contextlib.nullcontext():
                    (mse_loss(model(inputs), targets) / 2).backward()
            optimizer.step()
        return parameters(model)

    traces = run(f"EveryStep(accumulate=2) + {compressor}", 8, rule=sgd(momentum=0.9))
    close(agree([trace.path[-1] for trace in traces]), agree(cluster(by_hand, WORLD)))


class Scaler:
    """A GradScaler whose scale is set by hand."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale

    def is_enabled(self) -> bool:
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


@pytest.mark.parametrize("recipe", ["EveryStep(accumulate=3)", "EveryStep(accumulate=3) + TopK(0.2)"])
def test_a_loss_scale_may_change_between_passes(recipe: str) -> None:
    """Sums are kept without it: powers of two change no bit."""

    def work(worker: Worker, scales: Sequence[float]) -> Tensor:
        model, scaler = network(worker.rank), Scaler()
        optimizer = sgd()(model)
        worker.attach(model, optimizer, recipe, scaler=scaler)
        for step in range(9):
            scaler.scale = scales[step % len(scales)]
            inputs, targets = batch(step, worker.rank)
            (scaler.scale * mse_loss(model(inputs), targets)).backward()
            if step % 3 == 2:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(scaler.scale)
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model)

    plain = agree(cluster(lambda worker: work(worker, [1.0]), 2))
    assert torch.equal(plain, agree(cluster(lambda worker: work(worker, [1024.0, 8.0, 64.0, 2.0]), 2)))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_grad_scaler_with_the_classical_loop(bad: int) -> None:
    """An overflow in any pass of an exchange skips the exchange, on every rank, and lowers everyone's scale."""

    def work(worker: Worker, overflows: bool) -> tuple[Tensor, Tensor, float, int]:
        model = network(worker.rank, torch.float32)
        optimizer = sgd(momentum=0.9)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        session = worker.attach(model, optimizer, "EveryStep(accumulate=3)", scaler=scaler)
        before = START
        for step in range(9):
            inputs, targets = batch(step, worker.rank, dtype=torch.float32)
            factor = math.inf if overflows and step == 3 + bad and worker.rank == 1 else 1.0
            scaler.scale(mse_loss(model(inputs), targets) * factor).backward()
            if step % 3 == 2:
                if step == 5:
                    before = parameters(model)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if step == 5:
                    assert torch.equal(before, parameters(model)) == overflows
        return parameters(model), before, scaler.get_scale(), session.steps

    for overflows in (True, False):
        results = cluster(lambda worker, o=overflows: work(worker, o), 2)
        agree([ended for ended, *_ in results])
        assert {(scale, steps) for *_, scale, steps in results} == {(128.0, 2) if overflows else (256.0, 3)}


def test_a_bad_pass_is_gone_with_its_exchange() -> None:
    """Nothing of it is left in the sums."""

    def work(worker: Worker, bad: int) -> Tensor:
        model, optimizer, _ = worker.start(network(worker.rank), sgd(), "EveryStep(accumulate=3) + TopK(0.3)")
        for step in range(9):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            (mse_loss(model(inputs), targets) * (math.nan if step == bad and worker.rank == 2 else 1.0)).backward()
            optimizer.step()
        return parameters(model)

    first = agree(cluster(lambda worker: work(worker, 0), WORLD))
    assert torch.isfinite(first).all()
    assert torch.equal(first, agree(cluster(lambda worker: work(worker, 2), WORLD)))
    assert not torch.equal(first, agree(cluster(lambda worker: work(worker, 5), WORLD)))


def test_a_parameter_that_one_pass_used_is_averaged() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        with seeded(0):
            first, second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        model = nn.ModuleList([first, second])
        optimizer = torch.optim.SGD(model.parameters(), LR, weight_decay=0.1)
        worker.attach(model, optimizer, "EveryStep(accumulate=2)")
        before = parameters(second)
        for step in range(4):
            optimizer.zero_grad()
            used = second if step == 2 and worker.rank == 1 else first
            loss_of(used, step, worker.rank).backward()
            optimizer.step()
            if step == 1:
                assert torch.equal(parameters(second), before), "weight decay moved what nobody used"
        assert not torch.equal(parameters(second), before)
        return parameters(first), parameters(second)

    for layer in zip(*cluster(work, 2), strict=True):
        agree(layer)
