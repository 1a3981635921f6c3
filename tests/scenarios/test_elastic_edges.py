"""Elastic edges: losses and newcomers beside bad numbers, buffers, sparse rows, quiet passes, epochs and saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Loss
from support.elastic_training import EVERY, STEPS, Told, again, check_alike, told
from support.nightly import nightly
from support.sessions import sgd
from support.virtual_workers import Worker, batch, loss_of, network, seeded, train_step
from torch import nn
from torch.nn.functional import mse_loss

from gossamer.train.world_state import WorldState

Work = Callable[[str, Worker], Told]


def everywhere(work: Work, recipe: str, steps: int | None = STEPS, *, joins: bool = True) -> None:
    """Lost at some operations, heard by nobody and by some; and a newcomer at others."""
    run = ElasticRun(3)
    check_alike(run(partial(work, recipe)), *([] if steps is None else [steps]))
    ops = run.members.operations[0, 2]
    for turn, op in enumerate(range(4, ops - 1, max(1, (ops - 5) // 2))):
        loss = Loss(victim=0, op=op, answered=True, deaf=frozenset({1})) if turn % 2 else Loss(victim=1, op=op)
        with again(work.__name__, recipe, loss):
            assert len(check_alike(ElasticRun(3, loss)(partial(work, recipe)), steps or STEPS)) == 2
        if joins:
            with again(work.__name__, recipe, Join(op=op)):
                results = ElasticRun(3, newcomers=1, join=Join(op=op))(partial(work, recipe))
                check_alike(results, steps or STEPS)


def with_bad_numbers(recipe: str, worker: Worker) -> Told:
    """Rank 2's gradients are not finite in two passes."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    skipped = 0
    while session.steps < STEPS:
        optimizer.zero_grad()
        before, bad = session.steps, worker.rank == 2 and session.steps in (1, 3) and skipped < 2
        (loss_of(model, session.steps, worker.rank) * (float("nan") if bad else 1.0)).backward()
        optimizer.step()
        skipped += bad and session.steps == before
    return told(session)


def with_scaler(recipe: str, worker: Worker) -> Told:
    """Rank 2 overflows once."""
    model = network(worker.rank, torch.float32)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    session = worker.attach(model, optimizer, recipe, scaler=scaler)
    overflown = worker.rank != 2
    while session.steps < STEPS:
        bad = session.steps == 2 and not overflown
        overflown = overflown or bad
        optimizer.zero_grad()
        scaler.scale(loss_of(model, session.steps, worker.rank) * (1e38 * 1e38 if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    done = told(session)
    done.agreed = torch.cat([done.agreed, torch.tensor([scaler.get_scale()])])
    return done


def with_buffers(recipe: str, worker: Worker) -> Told:
    """BatchNorm's statistics are those of the first rank after every step."""
    with seeded(worker.rank):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model, optimizer, session = worker.start(model, sgd, recipe)
    while session.steps < STEPS:
        train_step(model, optimizer, session.steps, worker.rank)
    done = told(session)
    done.agreed = torch.cat([done.agreed, *(each.flatten().double() for each in model.buffers())])
    return done


def with_sparse_rows(recipe: str, worker: Worker) -> Told:
    with seeded(worker.rank):
        model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)).double()
    model, optimizer, session = worker.start(model, partial(sgd, momentum=0.0), recipe)
    while session.steps < STEPS:
        optimizer.zero_grad()
        rows = torch.tensor([worker.rank, 5 + session.steps, 3])
        model(rows).square().mean().backward()
        optimizer.step()
    return told(session)


def with_quiet_passes(recipe: str, worker: Worker) -> Told:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    while session.steps < STEPS:
        optimizer.zero_grad()
        step = session.steps
        with session.no_sync():
            loss_of(model, 100 + step, worker.rank).backward()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    return told(session)


def with_uneven_inputs(recipe: str, worker: Worker) -> Told:
    """Ranks with two, three and four batches in an epoch, of which there are two."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    for epoch in range(2):
        with session.epoch():
            for step in range(2 + worker.rank % 3):
                train_step(model, optimizer, 10 * epoch + step, worker.rank)
    done = told(session)
    done.steps = STEPS  # the longest epoch's, of whoever is there
    return done


GOSSIP = "Gossip() + TopK(0.2) + Ring()"
WORKS: list[Work] = [with_bad_numbers, with_scaler, with_buffers, with_sparse_rows, with_quiet_passes]


@pytest.mark.parametrize("recipe", ["TopK(0.1)", *nightly("Dense()")])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_promise_9_and_others_hold_through_losses_and_joins(work: Work, recipe: str) -> None:
    everywhere(work, recipe)


@pytest.mark.parametrize("work", [with_bad_numbers, *nightly(with_sparse_rows, with_quiet_passes)])
def test_gossip_through_losses_and_joins(work: Work) -> None:
    everywhere(work, GOSSIP)


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "LocalSGD(2)", GOSSIP, *nightly("Dense()")])
def test_uneven_inputs_through_losses(recipe: str) -> None:
    everywhere(with_uneven_inputs, recipe, STEPS, joins=False)


@pytest.mark.parametrize(
    ("recipe", "every"), [("TopK(0.1)", 3), ("LocalSGD(2)", 1), (GOSSIP, 3), *nightly(*((each, 1) for each in EVERY))]
)
def test_those_without_data_end_together_if_all_that_train_are_lost(recipe: str, every: int) -> None:
    """Rank 2 has the most batches. Lost at every third operation, nightly at each."""
    run = ElasticRun(3)
    run(partial(with_uneven_inputs, recipe))
    for op in range(4, run.members.operations[0, 2], every):
        with again(recipe, op):
            loss = Loss(victim=2, op=op)
            assert len(check_alike(ElasticRun(3, loss)(partial(with_uneven_inputs, recipe)))) == 2


# -- checkpoints -------------------------------------------------------------------------------------------------------


SAVED = ["Dense()", "TopK(0.1)", "LocalSGD(2)"]
SAVED_STEPS = 4  # two checkpoints: the first, and one that takes its place


def saving(directory: Path, recipe: str, worker: Worker) -> Told:
    world = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, world=world)
    while session.steps < SAVED_STEPS:
        train_step(model, optimizer, session.steps, worker.rank)
        if session.steps % 2 == 0:
            session.save(directory)
    return told(session)


def resumed(directory: Path, recipe: str, worker: Worker) -> Told:
    world = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
    _, _, session = worker.start(network(worker.rank), sgd, recipe, world=world)
    session.load(directory)
    return Told(session.steps, told(session).agreed, torch.empty(0), session)


@pytest.mark.parametrize(("recipe", "every"), [("TopK(0.1)", 3), *nightly(*((each, 1) for each in SAVED))])
def test_a_checkpoint_is_whole_whoever_is_lost_while_it_is_written(recipe: str, every: int, tmp_path: Path) -> None:
    """At every third operation, nightly at each."""
    run = ElasticRun(3)
    whole = check_alike(run(partial(saving, tmp_path / "whole", recipe)), SAVED_STEPS)[0]
    ops = run.members.operations[0, 2]
    for op in range(5, ops, every):
        for victim, answered in ((0, False), (1, True)):
            where = tmp_path / f"{op} {victim}"
            loss = Loss(victim=victim, op=op, answered=answered, deaf=frozenset({2}) if answered else frozenset())
            with again("saving", recipe, loss):
                results = ElasticRun(3, loss)(partial(saving, where, recipe))
                here = [each for each in results if each is not None]
                if len(here) == 3:
                    continue
                here = check_alike(here, SAVED_STEPS)
                back = check_alike(ElasticRun(2)(partial(resumed, where, recipe)), SAVED_STEPS)
                assert torch.equal(back[0].agreed, here[0].agreed)
    assert whole.steps == SAVED_STEPS


def test_newcomers_wait_while_others_save(tmp_path: Path) -> None:
    run = ElasticRun(2)
    run(partial(saving, tmp_path / "whole", "TopK(0.1)"))
    for op in range(4, run.members.operations[0, 2] - 3, 2):
        with again("saving", op):
            results: list[Any] = ElasticRun(2, newcomers=1, join=Join(op=op))(
                partial(saving, tmp_path / str(op), "TopK(0.1)")
            )
            check_alike(results, SAVED_STEPS)


def test_batches_are_not_alike() -> None:
    """Or agreement would show nothing."""
    assert not torch.equal(batch(0, 0)[0], batch(0, 1)[0])
    assert mse_loss(*batch(0, 0)[1:], batch(0, 1)[1]) > 0
