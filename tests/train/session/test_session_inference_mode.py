"""Calls within torch.inference_mode(): they work, and training continues outside of the block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, network, parameters, train_step
from torch import Tensor, nn

import gossamer
from gossamer.errors import AttachError
from gossamer.train.session.session import Session

RECIPES = ["Dense()", "TopK(0.3)", "LocalSGD(3)", "DelayedAveraging(2) + TopK(0.3)", "Gossip() + Ring()"]


def merged(session: Session, _: Path) -> Tensor:
    with session.averaged_parameters(session.model) as model:
        return parameters(model)


CALLS: dict[str, Callable[[Session, Path], Any]] = {
    "merged": merged,
    "save": lambda session, folder: session.save(folder),
    "load": lambda session, folder: session.load(folder),
    "switch": lambda session, _: session.switch("Int8()"),
    "add_parameters": lambda session, _: session.add_parameters(),
    "reset": lambda session, _: session.reset_compressor_state("0.weight"),
}


def train_around(worker: Worker, recipe: str, call: str, folder: Path) -> Tensor:
    model = network(0)
    optimizer = sgd(model)
    with torch.inference_mode(call == "attach"):
        session = worker.attach(model, optimizer, recipe)
    for step in range(4):
        train_step(model, optimizer, step, worker.rank)
    session.save(folder)
    if call == "add_parameters":
        model.register_parameter("more", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    with torch.inference_mode():
        CALLS.get(call, merged)(session, folder)
    for step in range(4, 10):
        train_step(model, optimizer, step, worker.rank)
    return merged(session, folder)


@pytest.mark.parametrize("call", ["attach", *CALLS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_within_inference_mode_leaves_what_can_be_trained(recipe: str, call: str, tmp_path: Path) -> None:
    agree(cluster(lambda worker: train_around(worker, recipe, call, tmp_path), 2))


def test_a_model_that_was_built_within_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match=r'"weight" was created within torch\.inference_mode\(\)'):
        gossamer.attach(model, sgd(model))
