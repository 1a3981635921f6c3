"""Newcomers and schedules: a newcomer whose learning rates would differ ends alone, and the others train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join
from support.virtual_workers import Worker, cluster, loss_of, network, notices
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from gossamer.errors import MismatchError
from gossamer.train.session.session import Session

STEPS, COUNT = 12, 3
JOIN = Join(op=8)
Make = Callable[[torch.optim.Optimizer, int], LRScheduler]


def decay(length: int) -> Callable[[int], float]:
    return lambda step: 1 / (1 + step / length)


def by_length(optimizer: torch.optim.Optimizer, number: int) -> LRScheduler:
    """As with len(loader), where a newcomer has another."""
    return LambdaLR(optimizer, decay(20 if number < COUNT else 14))


def alike(optimizer: torch.optim.Optimizer, number: int) -> LRScheduler:
    return LambdaLR(optimizer, decay(20))


def cosine(optimizer: torch.optim.Optimizer, number: int) -> LRScheduler:
    """The length is in its state, which is handed over."""
    return CosineAnnealingLR(optimizer, 20 if number < COUNT else 14)


class Training:
    def __init__(self, make: Make, way: str, recipe: str = "Dense()") -> None:
        self.make, self.way, self.recipe = make, way, recipe
        self.refusals: dict[int, str] = {}
        self.steps: dict[int, int] = {}

    def __call__(self, worker: Worker) -> None:
        try:
            self.train(worker)
        except MismatchError as refusal:
            self.refusals[worker.rank] = str(refusal)
            raise

    def train(self, worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = self.make(optimizer, worker.rank)
        session = worker.attach(
            model, optimizer, self.recipe, **({"scheduler": scheduler} if self.way == "at attach" else {})
        )
        if self.way == "below attach":
            session.track(scheduler=scheduler)
        while session.steps < STEPS:
            loss_of(model, session.steps, worker.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.steps[worker.rank] = session.steps


def run(training: Training, newcomers: int = 1) -> dict[int, str]:
    """The refusals by number; the others have made all steps."""
    group = ElasticRun(COUNT, newcomers=newcomers, join=JOIN)
    with notices():
        try:
            group(training)
        except MismatchError:
            assert training.refusals
    assert {number: training.steps.get(number) for number in range(COUNT)} == dict.fromkeys(range(COUNT), STEPS)
    return training.refusals


@pytest.mark.parametrize("way", ["at attach", "below attach", "untracked"])
def test_a_newcomer_whose_functions_differ_ends_alone(way: str) -> None:
    training = Training(by_length, way)
    refusals = run(training)
    assert list(refusals) == [COUNT]
    if way == "untracked":
        assert "optimizer settings" in refusals[COUNT]
        assert "session.track(scheduler=scheduler)" in refusals[COUNT]
    else:
        assert "functions of scheduler" in refusals[COUNT]
        assert "len(loader) before gossamer.attach" in refusals[COUNT]
        assert COUNT not in training.steps, "it was refused before it made a step"


@pytest.mark.parametrize("make", [alike, cosine])
@pytest.mark.parametrize("way", ["at attach", "below attach"])
def test_a_newcomer_with_the_same_functions_or_all_in_its_state_trains_along(make: Make, way: str) -> None:
    training = Training(make, way)
    assert run(training) == {}
    assert training.steps[COUNT] == STEPS


def test_two_newcomers_with_other_rates_do_not_end_the_others_by_their_number() -> None:
    training = Training(by_length, "untracked")
    assert set(run(training, newcomers=2)) <= {COUNT, COUNT + 1}
    assert training.refusals


def test_where_workers_train_apart_other_rates_end_nobody() -> None:
    assert run(Training(by_length, "untracked", "LocalSGD(period=2)")) == {}


def test_members_that_began_the_run_with_other_settings_all_end() -> None:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        worker.attach(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.1 + worker.rank
        with pytest.raises(MismatchError, match="settings"):
            loss_of(model, 0, worker.rank).backward()

    ElasticRun(2)(work)


def test_a_newcomer_with_another_kind_of_optimizer_is_refused() -> None:
    said: list[str] = []

    def work(worker: Worker) -> None:
        kind = torch.optim.SGD if worker.rank < COUNT else torch.optim.Adagrad
        model = network(worker.rank)
        optimizer = kind(model.parameters(), lr=0.01)
        if worker.rank == COUNT:
            with pytest.raises(MismatchError) as refusal:
                worker.attach(model, optimizer)
            said.append(str(refusal.value))
            return
        session = worker.attach(model, optimizer)
        while session.steps < STEPS:
            loss_of(model, session.steps, worker.rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    ElasticRun(COUNT, newcomers=1, join=JOIN)(work)
    assert "Adagrad with groups of 6 parameters" in said[0]
    assert "functions" not in said[0]


def test_a_newcomer_whose_state_is_not_the_groups_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    take_up = Session._take_up

    def forgetful(self: Session, alike: Any, own: Any) -> None:
        take_up(self, alike, own)
        with torch.no_grad():
            next(self.model.parameters()).add_(1)

    monkeypatch.setattr(Session, "_take_up", forgetful)
    training = Training(alike, "at attach")
    refusals = run(training)
    assert list(refusals) == [COUNT]
    assert "differs from the group's after the transfer" in refusals[COUNT]


def test_ranks_with_fewer_batches_take_over_the_tracked_scheduler() -> None:
    """Rank 1 misses a step of each epoch, and its scheduler a step: the rates are alike again in the next epoch."""

    def work(worker: Worker) -> float:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = LambdaLR(optimizer, decay(20))
        session = worker.attach(model, optimizer, "Dense()", scheduler=scheduler)
        for _ in range(3):
            with session.epoch():
                for step in range(3 - worker.rank):
                    loss_of(model, step, worker.rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        assert scheduler.last_epoch == 9
        return scheduler.get_last_lr()[0]

    assert len({*cluster(work, 2)}) == 1
