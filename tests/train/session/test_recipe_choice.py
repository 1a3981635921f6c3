"""Recipe choice: nothing of a recipe is dropped by what uses its compressor alone, and the command line is heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.virtual_workers import network, notices

import gossamer
from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import LocalSGD
from gossamer.algorithms.topologies import Ring
from gossamer.errors import RecipeError
from gossamer.train.session.recipe_choice import chosen_recipe
from gossamer.train.world_state import WorldState


@pytest.fixture(autouse=True)
def no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_RECIPE", raising=False)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hook(recipe: Any) -> Any:
    return gossamer.ddp_hook(network(0), recipe)


def average(recipe: Any) -> Any:
    return gossamer.average_([torch.ones(3)], recipe)


@pytest.mark.parametrize(("caller", "name"), [(hook, "ddp_hook"), (average, "average_")])
@pytest.mark.parametrize(
    ("recipe", "dropped"),
    [
        ("LocalSGD(period=8)", r"LocalSGD\(period=8\)"),
        ("LocalSGD(period=8) + Ring()", r"LocalSGD\(period=8\) and Ring\(\)"),
        ("DiLoCo(period=100) + Int8()", r"DiLoCo\(period=100\)"),
        ("EveryStep(accumulate=2)", r"EveryStep\(accumulate=2\)"),
        ("TopK(0.1) + Ring()", r"Ring\(\)"),
        (LocalSGD(period=8) + Dense(), r"LocalSGD\(period=8\)"),
        (Dense() + Ring(), r"Ring\(\)"),
    ],
)
def test_what_would_be_dropped_is_refused(caller: Callable[[Any], Any], name: str, recipe: Any, dropped: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"gossamer\.{name} averages .* so {dropped} of .*gossamer\.{name}\(\.\.\., '"
    ):
        caller(recipe)


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "EveryStep() + TopK(0.1) + Complete()", gossamer.TopK(density=0.1)])
def test_a_compressor_alone_is_completed(recipe: Any, group_of_one: None) -> None:
    state, _ = hook(recipe)
    state.comm_thread.close()
    assert state.memory.compressor == resolve("TopK(0.1)", 1).compressor
    average(recipe)


def test_the_command_lines_recipe_reaches_the_hook(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", "Int8()")
    with notices() as said:
        state, _ = hook("TopK(0.1)")
    state.comm_thread.close()
    assert state.memory.compressor == resolve("Int8()", 1).compressor
    assert said == ["the command line's recipe, Int8(), replaces the script's, TopK(0.1)"]
    monkeypatch.setenv("GOSSAMER_RECIPE", "DiLoCo(period=8)")
    with pytest.raises(RecipeError, match=r"DiLoCo\(period=8\) of DiLoCo\(period=8\) would be ignored"):
        hook("TopK(0.1)")


def test_what_is_averaged_once_keeps_its_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", "DiLoCo(period=8)")
    average("Dense()")


def test_the_recipe_of_an_advice_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "advice.json").write_text('{"advice_version": 1, "recipe": "Int8()"}')
    alone = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    assert chosen_recipe(f"@{tmp_path}/advice.json", alone) == "Int8()"
    monkeypatch.setenv("GOSSAMER_RECIPE", f"@{tmp_path}/advice.json")
    assert chosen_recipe(None, alone) == "Int8()"
    monkeypatch.setenv("GOSSAMER_RECIPE", "@nowhere.json")
    with pytest.raises(RecipeError, match="does not exist"):
        chosen_recipe(None, alone)
