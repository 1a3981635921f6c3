"""Session checkpoint: what does not fit this run is refused before it is loaded, on every rank, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, cluster, network, notices, parameters, train_step
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from gossamer.errors import CheckpointError
from gossamer.train.session import session_checkpoint

Rule = Callable[[Iterable[Parameter]], Optimizer]
RULES: dict[str, Rule] = {
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "Adam": Adam,
    "AdamW": AdamW,
    "NAdam": NAdam,
    "RMSprop": RMSprop,
}


def saved(worker: Worker, rule: Rule, folder: Path) -> None:
    model = network(0)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, "TopK(0.5)")
    for step in range(2):
        train_step(model, optimizer, step, worker.rank)
    session.save(folder)


def loaded(worker: Worker, rule: Rule, folder: Path) -> None:
    model = network(3)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, "TopK(0.5)")
    before = parameters(model)
    try:
        session.load(folder)
    except CheckpointError:
        assert torch.equal(parameters(model), before), "some of it was loaded"
        raise
    train_step(model, optimizer, 2, worker.rank)


@pytest.mark.parametrize(
    ("written", "now"), [("SGD", "Adam"), ("Adam", "SGD"), ("Adam", "AdamW"), ("NAdam", "Adam"), ("AdamW", "RMSprop")]
)
def test_a_checkpoint_of_another_optimizer_is_refused(written: str, now: str, tmp_path: Path) -> None:
    cluster(lambda worker: saved(worker, RULES[written], tmp_path), 2)
    says = rf"was written with {written}, but this session has {now},.*Build {written}\(model\.parameters\(\)"
    with pytest.raises(CheckpointError, match=says):
        cluster(lambda worker: loaded(worker, RULES[now], tmp_path), 2)
    cluster(lambda worker: loaded(worker, RULES[written], tmp_path), 2)


def test_without_that_it_would_end_in_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checkpoint, "refuse_other_optimizer", lambda tree, optimizer: None)
    with pytest.raises(KeyError, match="momentum"):
        test_a_checkpoint_of_another_optimizer_is_refused("Adam", "SGD", tmp_path)


@pytest.mark.parametrize(
    "states", [(), (None,), (3,), ("x",), ([],), ({},), ({"passes": 1},), ({"rank": "0"},)], ids=repr
)
def test_what_is_no_state_is_named(states: tuple[Any, ...]) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, SGD(model.parameters(), 0.1)).load_state_dict(*states)

    with pytest.raises(
        CheckpointError, match=r"needs a result of session\.state_dict\(\): the state .*session\.load\("
    ):
        cluster(work, 2)


class Part:
    """Fails where it is saved."""

    def state_dict(self) -> dict[str, Any]:
        raise TypeError("nothing to save here")


def test_what_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    """The others would wait for it otherwise."""

    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, SGD(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match="rank 1: nothing to save here"):
            session.save(tmp_path, part=Part() if worker.rank else 0)

    cluster(work, 2)


def test_a_place_that_is_no_folder_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, SGD(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"rank 1: .*(Not a directory|File exists)"):
            session.save(tmp_path / ("file" if worker.rank else "folder"))

    cluster(work, 2)


class WrappedScheduler:
    """As AcceleratedScheduler: the scheduler lies in it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_scheduler_in_a_wrapper_is_one(tracked: bool, tmp_path: Path) -> None:
    model = network(0)
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def work(worker: Worker) -> None:
        session = worker.attach(model, optimizer)
        if tracked:
            session.track(scheduler=WrappedScheduler(scheduler))
        holds_itself: list[Any] = []
        holds_itself.append(holds_itself)
        with pytest.raises(CheckpointError, match="contains itself"):
            session.save(tmp_path, list=holds_itself)

    with notices() as said:
        cluster(work, 1)
    assert ["has a learning rate scheduler that is not" in line for line in said] == [True] * (not tracked)
