"""Weights that the script loads after attach: a recipe would send the difference as if it was trained."""

from __future__ import annotations

import copy

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, loss_of, network, notices, train_step

ONE_BIT = "LocalSGD(period=2) + OneBit()"
CHANGED = ["DiLoCo(period=2)", ONE_BIT, "DelayedAveraging(delay=1) + Int8()", "Gossip() + Ring() + Int8()"]
EXACT = ["Dense()", "Int8()", "LocalSGD(period=2)", "PostLocalSGD(period=2, start=50) + Int8()"]


def load_and_train(worker: Worker, recipe: str) -> None:
    model, optimizer, _ = worker.start(network(0), sgd, recipe)
    model.load_state_dict(network(1).state_dict())
    for step in range(2):
        train_step(model, optimizer, step, worker.rank)


@pytest.mark.parametrize("recipe", CHANGED)
def test_weights_loaded_after_attach_are_reported_once(recipe: str) -> None:
    with notices() as said:
        cluster(lambda worker: load_and_train(worker, recipe), 2)
    found = [line for line in said if "load_state_dict" in line]
    assert len(found) == 1
    assert "before gossamer.attach" in found[0]
    assert "session.load()" in found[0]


@pytest.mark.parametrize("recipe", EXACT)
def test_weights_loaded_after_attach_train_as_they_are_where_the_recipe_keeps_them(recipe: str) -> None:
    with notices() as said:
        cluster(lambda worker: load_and_train(worker, recipe), 2)
    assert [line for line in said if "load_state_dict" in line] == []


def test_weights_swapped_for_an_evaluation_are_silent() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, ONE_BIT)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(network(1).state_dict())
        with torch.no_grad():
            loss_of(model, 0, worker.rank)
        model.load_state_dict(own)
        train_step(model, optimizer, 0, worker.rank)

    with notices() as said:
        cluster(work, 2)
    assert [line for line in said if "load_state_dict" in line] == []


def test_a_resumed_session_is_silent(tmp_path) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd, ONE_BIT)
        train_step(model, optimizer, 0, worker.rank)
        session.save(tmp_path)
        train_step(model, optimizer, 1, worker.rank)
        session.load(tmp_path)
        train_step(model, optimizer, 1, worker.rank)

    with notices() as said:
        cluster(work, 2)
    assert [line for line in said if "load_state_dict" in line] == []


def test_a_copy_of_an_attached_model_loads_silently() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, ONE_BIT)
        average = copy.deepcopy(model)
        average.load_state_dict(network(1).state_dict())
        train_step(model, optimizer, 0, worker.rank)

    with notices() as said:
        cluster(work, 2)
    assert [line for line in said if "load_state_dict" in line] == []
