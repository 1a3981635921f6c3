"""Workers that train apart: a run that is stopped and taken up again, and what it must come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from support.virtual_workers import Rule, Worker, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import resolve

Snapshot = Mapping[str, Any]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    worker: Worker,
    recipe: str,
    start: int,
    stop: int,
    *,
    snapshot: Snapshot | None = None,
    keep: Sequence[int] = (),
    load: Path | None = None,
    save: Path | None = None,
    rule: Rule = adamw,
) -> tuple[list[Tensor], list[Tensor], dict[int, Snapshot]]:
    """(parameters, merged parameters by step; what was kept after the steps in `keep`)."""
    model = network(worker.rank)
    optimizer = rule(model)
    session = worker.attach(model, optimizer, resolve(recipe))
    if snapshot is not None:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        session.load_state_dict(snapshot["session"])
    if load is not None:
        assert session.load(load) == {"made": start}
    path, merged, kept = [], [], {}
    for step in range(start, stop):
        optimizer.zero_grad()
        session.set_batch_weight(2 + (step + worker.rank) % 3)
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        path.append(parameters(model))
        with session.averaged_parameters(model):
            merged.append(parameters(model))
        if step + 1 in keep:
            kept[step + 1] = deepcopy(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
            )
    if save is not None:
        session.save(save, made=stop)
    return path, merged, kept


def check_resume(
    recipe: str,
    after: Sequence[int],
    spoil: Callable[[Any], None] = lambda state: None,
    world: int = 3,
    rule: Rule = adamw,
) -> None:
    """What goes on from each snapshot goes where the run that was never interrupted went."""
    whole = cluster(lambda worker: train(worker, recipe, 0, 12, keep=after, rule=rule), world)
    for made in after:
        kept = [snapshots[made] for *_, snapshots in whole]
        for each in kept:
            spoil(each["session"])
        resumed = cluster(
            lambda worker, k=kept, m=made: train(worker, recipe, m, 12, snapshot=k[worker.rank], rule=rule), world
        )
        for (path, merged, _), (path_after, merged_after, _) in zip(whole, resumed, strict=True):
            for a, b in zip((*path[made:], *merged[made:]), (*path_after, *merged_after), strict=True):
                assert torch.equal(a, b), f"resumed after step {made}, training went another way"
