"""Gossip resumed: training goes the same way, with the same workers or others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gossip_rounds import Lopsided
from support.gossip_sessions import merged_of, pass_through, start
from support.resumed_training import check_resume, train
from support.training_loops import agree, close, heard
from support.virtual_workers import Worker, cluster, network, parameters
from torch import Tensor

from gossamer import events
from gossamer.algorithms.gossip.rules import MASS
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import Gossip


@pytest.mark.parametrize(
    ("recipe", "after", "world"),
    [
        ("Gossip() + Ring()", [3], 3),
        ("Gossip(period=3) + TopK(0.2) + Ring()", [2, 7], 4),
        ("Gossip() + PowerSGD(2) + Ring()", [5], 3),
        ("Gossip('push-sum', period=2) + Exponential(one_peer=True)", [3], 3),
        ("Gossip() + RandomPeers()", [5], 4),
    ],
)
def test_resumed_training_goes_the_same_way(recipe: str, after: Sequence[int], world: int) -> None:
    check_resume(recipe, after, world=world)


def test_resumed_push_sum_goes_the_same_way_where_masses_differ() -> None:
    check_resume(Recipe(strategy=Gossip("push-sum"), topology=Lopsided()), [3], world=4)  # type: ignore[arg-type]


def no_mass(session: Any) -> None:
    for kept in session["state"].values():
        kept[f"mixing.{MASS}"].fill_(1.0)


def nothing_public(session: Any) -> None:
    for kept in session["state"].values():
        kept["mixing.hat"].zero_()


def no_pull(session: Any) -> None:
    for kept in session["state"].values():
        kept["mixing.pull"].zero_()


def first_round(session: Any) -> None:
    session["progress"]["round"] = 1


@pytest.mark.parametrize(
    ("recipe", "spoil"),
    [
        (Recipe(strategy=Gossip("push-sum"), topology=Lopsided()), no_mass),
        ("Gossip() + TopK(0.2) + Ring()", nothing_public),
        ("Gossip() + TopK(0.2) + Ring()", no_pull),
        ("Gossip() + RandomPeers()", first_round),
    ],
    ids=["mass", "hat", "pull", "round"],
)
def test_the_resume_check_catches_what_is_forgotten(recipe: Any, spoil: Any) -> None:
    with pytest.raises(AssertionError, match="another way"):
        check_resume(recipe, [4], spoil, world=4)


@pytest.mark.parametrize("recipe", ["Gossip() + Ring()", "Gossip() + Int8() + Ring()", "Gossip('push-sum') + Ring()"])
def test_other_workers_begin_with_the_mean(recipe: str, tmp_path: Path) -> None:
    before = cluster(lambda worker: train(worker, recipe, 0, 4, save=tmp_path), 4)
    with heard(events.Noticed) as noticed:
        after = cluster(lambda worker: begun_again(worker, recipe, tmp_path), 2)
    mean = torch.stack([path[-1] for path, *_ in before]).mean(0)
    for begun, merged in after:
        close(begun, mean, 1e-12)
        assert torch.equal(merged, after[0][1])
    assert ["parameters are the mean" in event.message for event in noticed] == [True]


def begun_again(worker: Worker, recipe: str, directory: Path) -> tuple[Tensor, Tensor]:
    model = network(worker.rank)
    session = worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
    assert session.load(directory) == {"made": 4}
    begin = parameters(model)
    pass_through(session, range(4, 7), worker.rank)
    return begin, merged_of(session)


def test_resized_parameters_begin_anew_and_the_rest_goes_on() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        session = start(worker, "Gossip() + TopK(0.2) + Ring()")
        pass_through(session, range(3), worker.rank)
        session.optimizer.zero_grad()
        session.model.get_parameter("4.bias").data = torch.full((3,), float(worker.rank), dtype=torch.float64)
        session.reset_compressor_state("4.bias")
        pass_through(session, range(3, 6), worker.rank)
        state = session.state_dict()["state"]
        return torch.cat([state[name]["mixing.pull"].flatten() for name in sorted(state)]), merged_of(session)

    pulls, merged = zip(*cluster(work, 4), strict=True)
    agree(merged)
    assert float(torch.stack(pulls).sum(0).abs().max()) < 1e-13, "the copies no longer fit"
