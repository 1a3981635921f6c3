"""Parameter averaging resumed: to the bit, and with other numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed_training import check_resume, train
from support.training_loops import agree
from support.virtual_workers import Worker, cluster, network, parameters, train_step
from torch import Tensor

RESUMES = [
    ("LocalSGD(4) + TopK(0.2)", [2, 5]),
    ("LocalSGD(3, optimizer_state='average') + Int8()", [4]),
    ("PostLocalSGD(4, start=5) + TopK(0.2)", [3, 5, 7]),
    ("DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()", [2, 3, 7]),
    ("DiLoCo(4, outer_momentum=0.5, delay=2, optimizer_state='average') + PowerSGD(2)", [5]),
    ("DelayedAveraging(3) + TopK(0.1)", [2, 6]),
    ("DelayedAveraging(3, period=2) + Int8()", [5]),
    ("EveryStep(accumulate=3) + TopK(0.2)", [1, 5]),
    ("EveryStep(delay=2) + Int8()", [1, 4]),
]


@pytest.mark.parametrize(("recipe", "after"), RESUMES, ids=str)
def test_resumed_training_goes_the_same_way(recipe: str, after: Sequence[int]) -> None:
    check_resume(recipe, after)


def test_resumed_sites_go_the_same_way() -> None:
    check_resume("LocalSGD(4, per_site=2) + Int8()", [2, 5], world=4)


def no_flights(session: Any) -> None:
    session["progress"]["flights"] = []


def no_sums(session: Any) -> None:
    session["progress"]["accumulated"] = {"made": 0, "weight": 0.0, "used": []}


def no_weights(session: Any) -> None:
    session["progress"]["weights"] = [1.0 for _ in session["progress"]["weights"]]


def nothing_agreed(session: Any) -> None:
    for kept in session["state"].values():
        kept["merging.agreed"].zero_()


def nothing_owed(session: Any) -> None:
    for kept in session["state"].values():
        for key in kept:
            if key.endswith("residual"):
                kept[key].zero_()


@pytest.mark.parametrize(
    ("recipe", "after", "spoil"),
    [
        ("DiLoCo(6, fragments=3, delay=3, mix=0.5)", [3], no_flights),
        ("DelayedAveraging(3)", [6], no_flights),
        ("EveryStep(delay=2)", [4], no_flights),
        ("EveryStep(accumulate=3)", [5], no_sums),
        ("LocalSGD(4)", [6], no_weights),
        ("LocalSGD(4)", [6], nothing_agreed),
        ("LocalSGD(4) + TopK(0.2)", [6], nothing_owed),
    ],
)
def test_the_resume_check_catches_what_is_forgotten(recipe: str, after: Sequence[int], spoil: Any) -> None:
    with pytest.raises(AssertionError, match="another way"):
        check_resume(recipe, after, spoil)


@pytest.mark.parametrize(
    ("recipe", "made"),
    [
        ("DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()", 3),
        ("DelayedAveraging(3) + TopK(0.1)", 5),
        ("EveryStep(accumulate=3) + TopK(0.2)", 4),
        ("EveryStep(delay=2) + TopK(0.2)", 4),
        ("PostLocalSGD(4, start=5) + TopK(0.2)", 7),
        ("DiLoCo(6, delay=3, optimizer_state='average')", 7),
    ],
)
def test_saved_and_loaded_training_goes_the_same_way(recipe: str, made: int, tmp_path: Path) -> None:
    whole = cluster(lambda worker: train(worker, recipe, 0, 10), 3)
    cluster(lambda worker: train(worker, recipe, 0, made, save=tmp_path), 3)
    resumed = cluster(lambda worker: train(worker, recipe, made, 10, load=tmp_path), 3)
    for (path, merged, _), (path_after, merged_after, _) in zip(whole, resumed, strict=True):
        for a, b in zip((*path[made:], *merged[made:]), (*path_after, *merged_after), strict=True):
            assert torch.equal(a, b)


# -- other numbers of workers ------------------------------------------------------------------------------------------


MERGING = [
    "LocalSGD(4) + TopK(0.2)",
    "DiLoCo(6, fragments=3, delay=3, mix=0.5) + Int8()",
    "DelayedAveraging(3)",
    "PostLocalSGD(4, start=2)",
]


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("recipe", MERGING)
def test_other_workers_go_on_from_what_was_agreed(recipe: str, old: int, new: int, tmp_path: Path) -> None:
    def advance(worker: Worker) -> tuple[Tensor, Tensor, Tensor, int]:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = worker.attach(model, optimizer, recipe)
        session.load(tmp_path)
        begun = parameters(model)
        with session.averaged_parameters(model):
            merged = parameters(model)
        for step in range(7, 15):
            train_step(model, optimizer, step, worker.rank)
        with session.averaged_parameters(model):
            return begun, merged, parameters(model), session.steps

    before = cluster(lambda worker: train(worker, recipe, 0, 7, save=tmp_path), old)
    agreed = agree([merged[-1] for _, merged, _ in before])
    later = cluster(advance, new)
    for begun, merged, ended, steps in later:
        assert torch.equal(begun, agreed)
        assert torch.equal(merged, agreed)
        assert steps == 15
        assert not torch.equal(ended, agreed), "nothing was merged any more"
        assert torch.isfinite(ended).all()
    agree([ended for _, _, ended, _ in later])
