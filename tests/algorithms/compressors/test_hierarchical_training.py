"""Hierarchical compression: what is refused, and what training comes to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT
from support.between_nodes import FED_BACK
from support.virtual_workers import Worker, cluster, network, parameters, train_step
from torch import Tensor

from gossamer.algorithms.compressors import Feedback, Hierarchical, Sharded
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors
from gossamer.errors import RecipeError
from gossamer.train import checkpoint


def test_nodes_must_be_full() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    for world in (2, 6, 9):
        with pytest.raises(
            RecipeError,
            match=rf"{world} workers cannot be divided into nodes of 4.*per_node={ {2: 2, 6: 3, 9: 3}[world] }\.",
        ):
            Hierarchical(FED_BACK, per_node=4).init(like, AggregationContext(world=world))


def test_debts_that_move_with_the_workers_are_refused() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RecipeError, match="without the sharding"):
        Hierarchical(Feedback(Sharded(Int8())), per_node=2).init(like, AggregationContext(world=8))
    assert "Sharded" not in repr(resolve("Hierarchical(Int8(block=16), per_node=2)", 64))


# -- training ----------------------------------------------------------------------------------------------------------


def train(worker: Worker, recipe: str, steps: int, folder: Path | None = None, *, load: bool = False) -> Any:
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, resolve(recipe, worker.world))
    if load:
        session.load(folder)
    for step in range(session.steps, session.steps + steps):
        train_step(model, optimizer, step, worker.rank)
    if folder is not None and not load:
        session.save(folder)
    return parameters(model), session.state_dict()["state"]


def trained(recipe: str, world: int, steps: int = 4, folder: Path | None = None, *, load: bool = False) -> list[Any]:
    found = cluster(lambda worker: train(worker, recipe, steps, folder, load=load), world)
    for theirs, _ in found[1:]:
        assert torch.equal(theirs, found[0][0]), "ranks hold different parameters"
    return found


@pytest.mark.parametrize("recipe", ["EveryStep()", "LocalSGD(period=2)", "DiLoCo(period=2)"])
def test_dense_between_nodes_is_the_plain_mean(recipe: str) -> None:
    plain, nodes = trained(recipe, 4), trained(f"{recipe} + Hierarchy(per_node=2, between=Dense())", 4)
    torch.testing.assert_close(nodes[0][0], plain[0][0], rtol=1e-12, atol=1e-12)
    lossy = trained(f"{recipe} + {TOP_K}", 4)
    assert not torch.allclose(lossy[0][0], plain[0][0], rtol=1e-4)


TOP_K = "Hierarchy(per_node=2, between=Route(TopK(density=0.1), smallest=10))"


def test_resume_is_exact(tmp_path: Path) -> None:
    straight = trained(TOP_K, 4, 6)
    trained(TOP_K, 4, 3, tmp_path)
    resumed = trained(TOP_K, 4, 3, tmp_path, load=True)
    assert checkpoint.complete_steps(tmp_path, 0) == [3]
    for (a, remembered), (b, again) in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for name, parts in remembered.items():
            for key, tensor in parts.items():
                assert torch.equal(tensor, again[name][key]), f"{key} of {name} differs"


def mean_owed(states: Sequence[dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """By parameter, for each place the mean over nodes of what it still has to send."""
    found: dict[str, Tensor] = {}
    for name in states[0]:
        keys = sorted({key for state in states for key in state[name]})
        found[name] = torch.cat(
            [torch.stack([state[name][key] for state in states if key in state[name]]).mean(0) for key in keys]
        )
    return found


def test_another_number_of_nodes_goes_on(tmp_path: Path) -> None:
    before = mean_owed([state for _, state in trained(TOP_K, 4, 5, tmp_path)])
    after = mean_owed([state for _, state in trained(TOP_K, 8, 0, tmp_path, load=True)])
    assert any(owed.any() for owed in before.values())
    for name, owed in before.items():
        torch.testing.assert_close(after[name], owed, rtol=1e-12, atol=1e-15)
