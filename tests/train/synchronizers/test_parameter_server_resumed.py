"""Saved servers: k steps, a save, a load and k steps are 2k steps, bit for bit where rounds are lock-step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served_training import ROUNDS, step
from support.virtual_workers import Worker, cluster, network, parameters
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from gossamer.errors import CheckpointError
from gossamer.train.parameter_server import shard_state
from gossamer.train.parameter_server.flat_optimizer import FlatOptimizer

Rule = Callable[[Iterable[Parameter]], Optimizer]
RULES: dict[str, Rule] = {
    "SGD": lambda parameters: SGD(parameters, 0.05, momentum=0.9),
    "AdamW": lambda parameters: AdamW(parameters, 0.01),
}
LOCK_STEP = [
    *ROUNDS.values(),
    "ParameterServer(mode='sync', push=TopK(0.1), pull=Int8())",
    "ParameterServer(mode='sync', shards=2, pull=TopK(0.3)) + PowerSGD(rank=1)",
]


def trained(
    worker: Worker, recipe: str, rule: Rule, stop: int, load: Path | None, save: Path | None, **options: Any
) -> Any:
    model = network(worker.rank)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, recipe)
    mine = session.load(load) if load else {}
    assert not mine or mine["whose"] == worker.rank
    for number in range(session.steps, stop):
        step(model, optimizer, number, worker.rank)
    if save:
        session.save(save, whose=worker.rank, **options)
    with session.averaged_parameters(model):
        merged = parameters(model)
    found = session.steps, merged, parameters(model)
    session.close()
    return found


def check_resumes(recipe: str, rule: Rule, world: int, folder: Path, **options: Any) -> None:
    whole = cluster(lambda worker: trained(worker, recipe, rule, 6, None, None), world)
    cluster(lambda worker: trained(worker, recipe, rule, 3, None, folder, **options), world)
    resumed = cluster(lambda worker: trained(worker, recipe, rule, 6, folder, None), world)
    for (steps, merged, own), (later, again, theirs) in zip(whole, resumed, strict=True):
        assert steps == later == 6
        assert torch.equal(merged, again), "the servers went another way"
        assert torch.equal(own, theirs), "a worker went another way"


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [(recipe, rule) for recipe in LOCK_STEP for rule in RULES if (rule, "PowerSGD" in recipe) != ("AdamW", True)],
)
def test_k_steps_save_load_k_steps_are_2k_steps(recipe: str, rule: str, tmp_path: Path) -> None:
    check_resumes(recipe, RULES[rule], 2, tmp_path)


def test_three_workers_and_an_asynchronous_save(tmp_path: Path) -> None:
    check_resumes(ROUNDS["sync"], RULES["AdamW"], 3, tmp_path, asynchronous=True)


def test_small_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "PIECE_BYTES", 1000)
    check_resumes(ROUNDS["sync"], RULES["SGD"], 2, tmp_path)


def test_an_optimizer_that_is_forgotten_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatOptimizer, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError, match="another way"):
        check_resumes(ROUNDS["sync"], RULES["SGD"], 2, tmp_path)


@pytest.mark.parametrize("recipe", ["ParameterServer('async')", "ParameterServer('stale', staleness=2)"])
def test_without_rounds_the_servers_go_on_from_what_they_had(recipe: str, tmp_path: Path) -> None:
    """Later pushes may come in another order, so no more is promised."""
    before = cluster(lambda worker: trained(worker, recipe, RULES["SGD"], 4, None, tmp_path), 2)
    after = cluster(lambda worker: trained(worker, recipe, RULES["SGD"], 4, tmp_path, None), 2)
    assert [steps for steps, *_ in after] == [4, 4]
    assert torch.equal(before[0][1], after[0][1])
    cluster(lambda worker: trained(worker, recipe, RULES["SGD"], 9, tmp_path, None), 2)


def test_saving_twice_and_epochs_go_together(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool, epochs: range) -> torch.Tensor:
        model = network(worker.rank)
        optimizer = RULES["SGD"](model.parameters())
        session = worker.attach(model, optimizer, ROUNDS["sync"])
        if load:
            session.load(tmp_path)
        for epoch in epochs:
            with session.epoch():
                for number in range(3):
                    step(model, optimizer, 3 * epoch + number, worker.rank)
            session.save(tmp_path)
        session.close()
        return parameters(model)

    whole = cluster(lambda worker: work(worker, False, range(4)), 2)
    for path in tmp_path.iterdir():
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    cluster(lambda worker: work(worker, False, range(2)), 2)
    resumed = cluster(lambda worker: work(worker, True, range(2, 4)), 2)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    cluster(lambda worker: trained(worker, ROUNDS["sync"], RULES["SGD"], 2, None, tmp_path), 2)

    def load(worker: Worker) -> None:
        model = network(worker.rank)
        session = worker.attach(model, RULES["SGD"](model.parameters()), ROUNDS["sync"])
        with pytest.raises(CheckpointError, match=r"2 workers|layout|recipe"):
            session.load(tmp_path)
        session.close()

    cluster(load, 3)


def test_a_state_without_the_servers_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        session = worker.attach(model, RULES["SGD"](model.parameters()), ROUNDS["sync"])
        with pytest.raises(CheckpointError, match=r"lacks the state of the servers.*session\.save\(directory\)"):
            session.load_state_dict(session.state_dict())
        session.close()

    cluster(work, 2)
