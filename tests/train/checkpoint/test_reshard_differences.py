"""Resharding where differences travel: new workers begin from what all agreed on, as if they had sent it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resharded_training import train
from support.resumed_training import check_resume
from support.virtual_workers import Worker, agree, cluster, network, train_step
from torch import Tensor, nn

from gossamer.algorithms.compressors import feedback_rules
from gossamer.algorithms.compressors.feedback_rules import BEGUN, KNOWN, KNOWN_MEAN, SMOOTHED
from gossamer.algorithms.compressors.sharded import UNSENT
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.train.checkpoint import reshard

PLAIN = "Feedback(TopK(0.1), rule='ef21', momentum=0.5)"
RECIPES = [
    PLAIN,
    "Feedback(Sharded(Int8(block=16)), rule='ef21')",
    "Feedback(PowerSGD(2), rule='ef21')",
    "OneBitAdam(warmup=1, inner=Feedback(OneBit(), rule='ef21'))",
]


def of(state: Any, kind: str) -> dict[str, Tensor]:
    """By parameter, what a worker keeps under a key that ends so."""
    return {name: tensor for name, kept in state["state"].items() for key, tensor in kept.items() if key.endswith(kind)}


def check_folding(old: int, new: int, recipe: str, folder: Path) -> None:
    before = [end for _, end in cluster(lambda worker: train(worker, recipe, 5, save=folder), old)]
    later = cluster(lambda worker: train(worker, recipe, 3, load=folder), new)
    answers = of(before[0][1], "." + KNOWN_MEAN)
    assert answers
    assert all(tensor.any() for tensor in answers.values())
    for (_, begun, *_), _ in later:
        for name, answer in answers.items():
            assert torch.equal(of(begun, "." + KNOWN_MEAN)[name], answer)
            assert torch.equal(of(begun, "." + KNOWN)[name], answer), "a new worker has told something else"
        for name, tensor in of(begun, SMOOTHED).items():
            theirs = torch.stack([of(state, SMOOTHED)[name] for _, state, *_ in before])
            torch.testing.assert_close(tensor, theirs.mean(0), rtol=1e-13, atol=1e-13)
        assert all(flag == 1 for flag in of(begun, BEGUN).values())
        assert not any(debt.any() for debt in of(begun, UNSENT).values())
    assert torch.isfinite(agree([ended for _, (ended, *_) in later])).all()
    for name, answer in of(later[0][1][1], "." + KNOWN_MEAN).items():
        told = torch.stack([of(state, "." + KNOWN)[name] for _, (_, state, *_) in later]).mean(0)
        debts = [of(state, UNSENT)[name].flatten() for _, (_, state, *_) in later if name in of(state, UNSENT)]
        debt = torch.cat(debts).view(answer.shape) if debts else 0.0
        torch.testing.assert_close(told - debt, answer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_new_workers_have_told_what_all_agreed_on(old: int, new: int, recipe: str, tmp_path: Path) -> None:
    check_folding(old, new, recipe, tmp_path)


@pytest.mark.parametrize("recipe", [PLAIN, RECIPES[1]])
def test_that_check_catches_who_begins_from_its_own(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "begins_from", lambda key: key)
    with pytest.raises(AssertionError):
        check_folding(4, 2, recipe, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_resuming_changes_no_bit(recipe: str) -> None:
    """Also where batches differ in size from step to step."""
    check_resume(recipe, (1, 5))


@pytest.mark.parametrize("kind", [KNOWN, KNOWN_MEAN, SMOOTHED, BEGUN])
def test_resuming_without_any_of_it_is_found(kind: str) -> None:
    def spoil(session: Any) -> None:
        for kept in session["state"].values():
            for key in [key for key in kept if key.rpartition(".")[2] == kind]:
                kept[key].zero_()

    with pytest.raises(AssertionError, match="another way"):
        check_resume(PLAIN, (5,), spoil)


def test_a_resized_parameter_begins_anew_and_its_neighbours_go_on() -> None:
    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = worker.attach(model, optimizer, resolve(RECIPES[1], worker.world))
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        answers = {name: tensor.clone() for name, tensor in of(session.state_dict(), "." + KNOWN_MEAN).items()}
        model[4].weight = nn.Parameter(torch.zeros(9, 16, dtype=torch.float64))
        session.reset_compressor_state("4.weight")
        return answers, of(session.state_dict(), "." + KNOWN)

    found = cluster(work, 3)
    for name, answer in found[0][0].items():
        told = torch.stack([kept[name] for _, kept in found]).mean(0)
        torch.testing.assert_close(
            told, torch.zeros_like(told) if name == "4.weight" else answer, rtol=1e-12, atol=1e-12
        )


def test_debtors_and_beginnings_are_found_behind_prefixes() -> None:
    assert feedback_rules.begins_from("place1.0.known") == "place1.0.known_mean"
    assert feedback_rules.begins_from("0.smoothed") == "0.smoothed"
    assert feedback_rules.debtor("0.", {"0.known": None}) == ("0.known", -1)
    assert feedback_rules.debtor("0.", {"0.residual": None}) == ("0.residual", 1)
