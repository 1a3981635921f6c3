"""Recipe choice: nothing of a recipe is dropped by what uses its compressor alone, and the command line is heard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, notices, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

import gossamer
from gossamer.algorithms.compressors import Dense, Feedback, Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import LocalSGD
from gossamer.algorithms.topologies import Ring
from gossamer.base.term import Inelastic
from gossamer.errors import AttachError, CheckpointError, LoopError, RecipeError
from gossamer.train.checkpoint import reshard
from gossamer.train.session import attach as attaching
from gossamer.train.session.recipe_choice import (
    chosen_recipe,
    refuse_inelastic,
    refuse_small_batch,
    with_global_batch,
)
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
def test_ignored_terms_of_a_recipe_are_refused(
    caller: Callable[[Any], Any], name: str, recipe: Any, dropped: str
) -> None:
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
    (notice,) = said
    assert re.search(r"Int8\(\).*replaces TopK\(0.1\)", notice)
    monkeypatch.setenv("GOSSAMER_RECIPE", "DiLoCo(period=8)")
    with pytest.raises(RecipeError, match=r"DiLoCo\(period=8\) of DiLoCo\(period=8\) would be ignored"):
        hook("TopK(0.1)")


def test_average_ignores_the_recipe_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- attach(global_batch=, batch=): short for a strategy, refused where it cannot be kept, resumed with other passes

WRITTEN = "EveryStep(global_batch=24, batch=2)"


@pytest.mark.parametrize("recipe", [None, "EveryStep()", WRITTEN])
def test_it_is_short_for_a_recipe(recipe: str | None) -> None:
    model = nn.Linear(3, 2)
    with gossamer.attach(model, SGD(model.parameters(), 0.1), recipe, global_batch=24, batch=2) as session:
        assert session.recipe == resolve(WRITTEN)
    assert with_global_batch(resolve("TopK(0.1)"), None, None) == resolve("TopK(0.1)")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"global_batch": 24}, AttachError, r"must be given together.*EveryStep\(global_batch=256, batch=32\)"),
        ({"batch": 2}, AttachError, "must be given together"),
        ({"global_batch": 25, "batch": 2}, AttachError, "not a multiple of batch=2 samples.*global_batch=24"),
        ({"global_batch": 0, "batch": 2}, AttachError, "not a multiple of batch"),
        ({"global_batch": -4, "batch": -2}, AttachError, "batch must be a number of samples, 1 or more, got -2"),
        ({"global_batch": 24, "batch": 0}, AttachError, "batch must be a number of samples"),
        ({"global_batch": True, "batch": True}, RecipeError, "a whole number or None, got True"),
        ({"global_batch": 24.0, "batch": 2}, RecipeError, "a whole number or None, got 24.0"),
        ({"global_batch": "24", "batch": 2}, RecipeError, "a whole number or None, got '24'"),
        (
            {"global_batch": 24, "batch": 2, "recipe": "LocalSGD(4) + Int8()"},
            AttachError,
            r"strategy is LocalSGD\(period=4\)\. Write gossamer.attach\(model, optimizer, ",
        ),
        ({"global_batch": 24, "batch": 2, "recipe": "EveryStep(accumulate=2)"}, AttachError, "strategy is EveryStep"),
        (
            {"global_batch": 24, "batch": 2, "recipe": "EveryStep(global_batch=48, batch=2)"},
            AttachError,
            "strategy is EveryStep",
        ),
    ],
)
def test_impossible_global_batch_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(kind, match=message):
        gossamer.attach(model, SGD(model.parameters(), 0.1), **given)


@pytest.mark.parametrize("text", ["EveryStep(global_batch=24, batch=2, delay=1)", "EveryStep(global_batch=24)"])
def test_a_recipe_that_contradicts_itself_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"Write EveryStep\(global_batch="):
        resolve(text)


def test_too_many_workers_are_refused_as_they_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_small_batch(resolve(WRITTEN), 12)
    with pytest.raises(AttachError, match=r"12 batches of 2 samples, too few for 13 workers.*MAX of --workers"):
        refuse_small_batch(resolve(WRITTEN), 13)

    monkeypatch.setattr(attaching, "most_workers", lambda size: 16)
    model = nn.Linear(3, 2)
    with pytest.raises(AttachError, match=r"too few for 16 workers.*start at most 12 workers"):
        gossamer.attach(model, SGD(model.parameters(), 0.1), global_batch=24, batch=2)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(10, 2, sparse=True)
    with pytest.raises(AttachError, match=r"passes of a global batch accumulate.*Leave out global_batch"):
        gossamer.attach(model, SGD(model.parameters(), 0.1), global_batch=24, batch=2)


@pytest.mark.parametrize("world", [1, 2])
def test_an_untold_scaler_is_refused_also_alone(world: int) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(nn.Linear(3, 2), sgd, "EveryStep(global_batch=4, batch=2)")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        while session.accumulating:
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(LoopError, match=r"GradScaler scales the loss, but was not passed to gossamer.attach"):
            scaler.step(optimizer)

    cluster(work, world)


@pytest.mark.parametrize("world", [1, 3])
def test_a_scaler_steps_where_a_step_is_complete(world: int) -> None:
    def work(worker: Worker) -> tuple[int, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        model, optimizer, session = worker.start(nn.Linear(3, 2), sgd, WRITTEN, scaler=scaler)
        made = 0
        while session.steps < 4:
            bad = made == 1 and worker.rank == 0
            scaler.scale(model(torch.full((2, 3), torch.inf if bad else 1.0)).sum()).backward()
            if not session.accumulating:
                made += 1
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return made, scaler.get_scale()

    assert cluster(work, world) == [(5, 2.0**9)] * world


# -- checkpoints -------------------------------------------------------------------------------------------------------


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, generator=generator).double(), torch.randn(2, 2, generator=generator).double()


def linear(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Linear(3, 2).double()


def trained(
    folder: Path | None, steps: int, first: int, worker: Worker, recipe: str = WRITTEN, *, passes: int = 0
) -> Tensor:
    """Until so many steps are made, and `passes` more; batches are dealt out in turns, from number `first`."""
    model = linear(0)
    optimizer = sgd(model)
    session = worker.attach(model, optimizer, recipe)
    mine = {} if folder is None else session.load(folder)
    drawn = mine.get("drawn", first + worker.rank)
    while session.steps < steps or passes:
        passes -= session.steps >= steps
        x, y = batch(drawn)
        drawn += worker.world
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        session.save(folder, drawn=drawn)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def in_one_process(steps: int) -> Tensor:
    model = linear(0)
    optimizer = sgd(model)
    for step in range(steps):
        xs, ys = zip(*(batch(number) for number in range(12 * step, 12 * step + 12)), strict=True)
        mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_resumed_amid_a_step_is_the_same_bits(world: int, tmp_path: Path) -> None:
    whole = cluster(partial(trained, None, 4, 0), world)
    cluster(partial(trained, tmp_path, 2, 0, passes=1), world)
    for mine, theirs in zip(cluster(partial(trained, tmp_path, 4, 0), world), whole, strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(whole[0], in_one_process(4))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (1, 4), (5, 1)])
def test_a_run_resumed_by_other_workers_has_as_many_samples_a_step(before: int, after: int, tmp_path: Path) -> None:
    cluster(partial(trained, tmp_path, 2, 0), before)

    def resumed(worker: Worker) -> Tensor:
        model = linear(1)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, WRITTEN)
        session.load(tmp_path)
        assert session.steps == 2
        drawn = 24 + worker.rank
        while session.steps < 4:
            mse_loss(model(batch(drawn)[0]), batch(drawn)[1]).backward()
            drawn += worker.world
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    for mine in cluster(resumed, after):
        torch.testing.assert_close(mine, in_one_process(4))


def test_another_global_batch_is_another_run(tmp_path: Path) -> None:
    cluster(partial(trained, tmp_path, 1, 0), 2)
    with pytest.raises(CheckpointError, match="recipe"):
        cluster(partial(trained, tmp_path, 2, 0, recipe="EveryStep(global_batch=48, batch=2)"), 2)


def test_sums_of_different_numbers_of_passes_are_folded_by_weight() -> None:
    """Three passes of gradient 1 and one of 5: the mean is 2, whoever goes on."""

    def state(rank: int, total: float, weight: float) -> dict[str, Any]:
        accumulated = {"made": int(weight), "weight": weight, "used": ["w"] * rank}
        progress = {"step": 2, "passes": 9, "reference": 1.0, "accumulated": accumulated}
        kept = {"w": {"accumulated": torch.tensor([total])}}
        return {"rank": rank, "world": 2, "step": 2, "recipe": WRITTEN, "layout": "", "state": kept} | {
            "progress": progress
        }

    states = [state(0, 3.0, 3.0), state(1, 5.0, 1.0)]
    mine = {**state(0, 0.0, 0.0), "world": 3}
    folded = reshard.fold(states, mine)
    accumulated = folded["progress"]["accumulated"]
    assert folded["state"]["w"]["accumulated"].item() / accumulated["weight"] == 2.0
    assert accumulated["used"] == ["w"]


# -- elastic runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("Dense() + Hierarchy(per_node=2, between=Int8())", "nodes, and the part.*Leave out Hierarchical"),
        ("Dense() + Hierarchy(per_node=2)", "nodes would change.*Leave out Hierarchy"),
        ("LocalSGD(period=4, per_site=2)", "sites would change.*Leave out per_site"),
        ("ParameterServer()", "there from the beginning.*AsyncDiLoCo"),
    ],
)
def test_an_elastic_run_refuses_terms_that_need_fixed_ranks(recipe: str, why: str) -> None:
    with pytest.raises(AttachError, match=f"an elastic run cannot have.*{why}.*--workers 4"):
        refuse_inelastic(resolve(recipe), range(1, 9))


@pytest.mark.parametrize(
    "recipe",
    [
        "Dense()",
        "TopK(density=0.1)",
        "DiLoCo(period=4) + Int8()",
        "PostLocalSGD(period=4, start=4)",
        "Feedback(Sharded(Int8()))",
        "Feedback(SparseSum(TopK(density=0.1)))",
        "DiLoCo(period=4, fragments=2) + Feedback(Sharded(OneBit()))",
    ],
)
def test_an_elastic_run_takes_terms_without_fixed_ranks(recipe: str) -> None:
    refuse_inelastic(resolve(recipe), range(1, 9))


def test_a_term_of_the_user_may_refuse_elastic_runs() -> None:
    @dataclass(frozen=True, repr=False)
    class ByRank(Int8):
        @property
        def inelastic(self) -> Inelastic:
            return Inelastic("its codes depend on ranks", "Write Int8()")

    with pytest.raises(AttachError, match="its codes depend on ranks"):
        refuse_inelastic(resolve(Feedback(ByRank())), range(1, 9))
