"""Resharding where a recipe's text has come to mean other wrappers: what still had to be sent is the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resharded_training import copied, train
from support.virtual_workers import Worker, agree, cluster, network, notices, parameters, train_step

from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.recipes.catalog import describe
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import reshard

GATHERED = "EveryStep() + Route(Feedback(TopK(density=0.1))) + Complete()"
SUMMED = "EveryStep() + Route(Feedback(SparseSum(TopK(density=0.1)))) + Complete()"
SHARDED = "EveryStep() + Route(Feedback(Sharded(Int8()))) + Complete()"
WORLD = 4

State = Mapping[str, Any]


def advance(worker: Worker, recipe: str, state: State) -> tuple[State, torch.Tensor, State]:
    """(remembered at once, parameters and what is remembered some steps later)"""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, recipe)
    session.load_state_dict(reshard.taken_up(state, session.state_dict()))
    begun = copied(session.state_dict())
    assert begun["recipe"] == recipe
    for step in range(session.steps, session.steps + 3):
        train_step(model, optimizer, step, worker.rank)
    assert session.steps == state["step"] + 3
    return begun["state"], parameters(model), session.state_dict()["state"]


def check_taken_up(written: str, now: str, spoil: Callable[[State], State] = lambda state: state) -> list[str]:
    """Residuals are bit-equal, and workers train on together; returns what was said."""
    states = [end[1] for _, end in cluster(lambda worker: train(worker, written, 5), WORLD)]
    with notices() as said:
        found = cluster(lambda worker: advance(worker, now, spoil(states[worker.rank])), WORLD)
    for state, (begun, _, later) in zip(states, found, strict=True):
        waiting = {name: kept for name, kept in state["state"].items() if kept}
        assert any(tensor.any() for kept in waiting.values() for tensor in kept.values())
        for name, kept in waiting.items():
            assert kept.keys() == begun[name].keys()
            assert all(key.endswith(RESIDUAL) and torch.equal(kept[key], begun[name][key]) for key in kept)
            assert not any(torch.equal(later[name][key], kept[key]) for key in kept)
    assert torch.isfinite(agree([ended for _, ended, _ in found])).all()
    return said


@pytest.mark.parametrize(("written", "now"), [(GATHERED, SUMMED), (SUMMED, GATHERED)], ids=["summed", "gathered"])
def test_what_waits_goes_on_bit_for_bit_and_rank_0_says_so(written: str, now: str) -> None:
    (line,) = check_taken_up(written, now)
    assert f"was written with {written}; the run continues with {now}" in line
    assert "write the recipe of the checkpoint with its wrappers" in line


def test_nothing_is_said_where_nothing_changed() -> None:
    assert check_taken_up(GATHERED, GATHERED) == []


def emptied(state: State) -> State:
    kept = {name: {key: torch.zeros_like(x) for key, x in each.items()} for name, each in state["state"].items()}
    return {**state, "state": kept}


def test_the_check_catches_what_is_forgotten() -> None:
    with pytest.raises(AssertionError):
        check_taken_up(GATHERED, SUMMED, emptied)


def test_who_owes_parts_is_refused_with_the_line_to_write() -> None:
    whole = SHARDED.replace("Sharded(Int8())", "Int8()")
    for written, now in ((SHARDED, whole), (whole, SHARDED)):
        with pytest.raises(CheckpointError, match=re.escape(f'gossamer.attach(model, optimizer, "{written}")')):
            check_taken_up(written, now)


def check_another_strategy(folder: Path, world: int) -> None:
    """Though their compressors are alike, and remember the same."""
    cluster(lambda worker: train(worker, "EveryStep(accumulate=2) + TopK(0.1)", 2, save=folder), 4)
    with pytest.raises(CheckpointError, match="recipe"):
        cluster(lambda worker: train(worker, "EveryStep() + TopK(0.1)", 1, load=folder), world)


@pytest.mark.parametrize("world", [2, 4])
def test_another_strategy_is_refused(world: int, tmp_path: Path) -> None:
    check_another_strategy(tmp_path, world)


def test_looking_at_compressors_only_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard, "_plain", lambda text: resolve(text).compressor)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_another_strategy(tmp_path, 2)


def test_texts_differ_only_in_what_the_number_of_workers_chooses() -> None:
    for example, _ in describe():
        assert reshard.alike(repr(resolve(example)), repr(resolve(example, 5)))
    assert not reshard.alike(GATHERED, GATHERED.replace("0.1", "0.2"))
    assert not reshard.alike(GATHERED, GATHERED.replace("EveryStep()", "LocalSGD(period=8)"))
    assert not reshard.alike("OfAnotherVersion()", GATHERED)
