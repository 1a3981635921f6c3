"""Training that is saved by one number of workers and resumed by another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.virtual_workers import Worker, network, parameters, train_step

from gossamer.algorithms.recipes.recipe import resolve


def train(worker: Worker, recipe: str, steps: int, load: Path | None = None, save: Path | None = None) -> Any:
    """Parameters and states: at the beginning, and after some steps."""
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, resolve(recipe, worker.world))
    mine = session.load(load) if load is not None else {}
    begun = parameters(model), copied(session.state_dict()), session.steps, mine
    for step in range(session.steps, session.steps + steps):
        train_step(model, optimizer, step, worker.rank)
    if save is not None:
        session.save(save, rank=worker.rank)
    return begun, (parameters(model), session.state_dict(), session.steps, mine)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    remembered = {
        name: {key: tensor.clone() for key, tensor in parts.items()} for name, parts in state["state"].items()
    }
    return {**state, "state": remembered}
