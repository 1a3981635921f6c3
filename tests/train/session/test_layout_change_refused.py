"""Added parameters that are refused: on every rank, with the line to write, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.growing_models import backward, steps, widened
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network
from torch import nn
from torch.optim import Adam, Optimizer

from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.train.session.session import Session


def refused(worker: Worker, act: Callable[[Worker, nn.Module, Optimizer, Session], None], recipe: str) -> str:
    model, optimizer, session = worker.start(network(0), sgd, recipe)
    steps(model, optimizer, session, range(3), worker.rank)
    try:
        act(worker, model, optimizer, session)
        steps(model, optimizer, session, range(3, 9), worker.rank)
    except (LoopError, AttachError, MismatchError) as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("recipe", ["Dense()", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_adding_on_one_rank_alone_is_an_error_on_all_that_names_the_call(recipe: str) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 1:
            optimizer.add_param_group({"params": widened(model, 0)})
            session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert "session.add_parameters()" in said
        assert "rank 1" in said
        assert "session.save()" not in said


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_switching_on_one_rank_alone_is_not_told_as_a_save(recipe: str) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 1:
            session.switch("Int8()")

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert "session.switch()" in said
        assert "session.save()" not in said


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)", "Gossip() + Complete()"])
def test_different_calls_on_different_ranks_are_all_named(recipe: str, tmp_path: Path) -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        if worker.rank == 0:
            session.save(tmp_path)
        elif worker.rank == 1:
            session.switch("Int8()")
        else:
            session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, recipe), 3):
        assert all(f"session.{call}()" in said for call in ("save", "switch", "add_parameters"))


def test_ranks_that_add_different_parameters_are_told_so_and_keep_what_they_had() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        before = [id(each) for bucket in session._synchronizer.buckets for each in bucket.parameters.values()]
        layer = nn.Linear(3 + worker.rank, 3).double()
        model.add_module("new", layer)
        optimizer.add_param_group({"params": layer.parameters()})
        try:
            session.add_parameters()
        finally:
            after = [id(each) for bucket in session._synchronizer.buckets for each in bucket.parameters.values()]
            assert before == after

    for said in cluster(lambda worker: refused(worker, act, "Dense()"), 2):
        assert "the ranks add different parameters" in said
        assert "(3, 4)" in said


def test_one_ranks_refusal_reaches_all() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        model.add_module("new", nn.Linear(2, 2, dtype=torch.complex64 if worker.rank else torch.float64))
        session.add_parameters()

    mine, other = cluster(lambda worker: refused(worker, act, "Dense()"), 2)
    assert "the ranks add different parameters" in mine
    assert "complex on rank 1" in mine or "is complex" in mine
    assert '"new.weight" is complex' in other


def test_momentum_that_a_compressor_applies_must_be_the_attached_optimizers() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        model.add_module("new", nn.Linear(16, 64).double())
        session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, "DGC(density=0.2)"), 2):
        assert 'does not hold "new.weight"' in said
        assert 'optimizer.add_param_group({"params": new_parameters}) first' in said


def test_adding_within_a_step_is_refused() -> None:
    def act(worker: Worker, model: nn.Module, optimizer: Optimizer, session: Session) -> None:
        backward(model, 3, worker.rank)
        session.add_parameters()

    for said in cluster(lambda worker: refused(worker, act, "Dense()"), 2):
        assert "right after optimizer.step()" in said


def test_a_frozen_variance_takes_no_new_parameters() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = Adam(model.parameters(), 1e-3)
        session = worker.attach(model, optimizer, "OneBitAdam(warmup=2)")
        steps(model, optimizer, session, range(3), worker.rank)
        model.add_module("new", nn.Linear(16, 64).double())
        optimizer.add_param_group({"params": model.new.parameters()})
        session.add_parameters()

    with pytest.raises(AttachError, match=r"frozen Adam's variance after its warm-up of 2 steps.*CompressedAdam"):
        cluster(work, 2)
