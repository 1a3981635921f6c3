"""What functions are told and tell: metrics of any kind of number, and batches as the recipe asks for them."""

from __future__ import annotations

import json
from math import isnan, nan
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.federations import federate, one_pass
from torch import nn

from gossamer.errors import LoopError
from gossamer.federated import Round, SGDSteps, Update
from gossamer.federated.client.functions import weighted_mean
from gossamer.federated.messages import Report, encode

NUMBERS = [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), np.float32(0.5), np.array([[0.5]]), 0.5]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_metrics_are_plain_numbers_in_records_and_messages(number: Any) -> None:
    for told in (
        Update(samples=1, metrics={"loss": number}),
        SGDSteps(loss=torch.sum, batches=[], learning_rate=0.1, samples=1, metrics={"loss": number}),
    ):
        assert [type(value) for value in told.metrics.values()] == [float]
        assert json.loads(json.dumps(dict(told.metrics))) == {"loss": 0.5}
        assert encode(Report(samples=1, steps=1, metrics=dict(told.metrics)))


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(3), "0.5", None, 1j, 10**400], ids=str)
def test_metrics_that_are_no_number_are_refused_by_name(value: Any) -> None:
    with pytest.raises(LoopError, match=r"The metric 'loss' is .*metrics=\{\"loss\": float\(value\)\}"):
        Update(samples=1, metrics={"steps": 3, "loss": value})


def test_a_device_may_tell_a_tensor() -> None:
    def told_by_tensors(model: nn.Module, told: Round) -> Update:
        update = one_pass(model, told)
        return Update(samples=update.samples, metrics={"loss": torch.tensor(update.metrics["loss"]).double()})

    (commit,) = federate("FedAvg(fraction=1.0)", clients=2, rounds=1, function=told_by_tensors).commits
    assert all(type(report.metrics["loss"]) is float for report in commit.reports.values())


def round_of(**length: int) -> Round:
    return Round(index=3, client=7, **length)


def test_batches_are_as_many_as_the_recipe_says() -> None:
    assert list(round_of(local_steps=5).batches([1, 2, 3])) == [1, 2, 3, 1, 2]
    assert list(round_of(local_epochs=2).batches([1, 2])) == [1, 2, 1, 2]
    told = round_of(local_steps=2)
    assert told.batches_given is None
    assert list(told.batches(iter([1, 2, 3]))) == [1, 2]
    assert told.batches_given == 2


@pytest.mark.parametrize("length", [{"local_steps": 5}, {"local_epochs": 2}])
def test_a_loader_without_batches_gives_none(length: dict[str, int]) -> None:
    told = round_of(**length)
    assert list(told.batches([])) == []
    assert told.batches_given == 0


@pytest.mark.parametrize("length", [{"local_steps": 5}, {"local_epochs": 2}])
def test_a_loader_that_a_pass_used_up_is_refused(length: dict[str, int]) -> None:
    with pytest.raises(LoopError, match=r"Client 7 has no more batch .* in round 3: its loader was used up"):
        list(round_of(**length).batches(iter([1, 2])))


def test_weighted_mean_does_not_overflow() -> None:
    assert weighted_mean([1.5e308, 1.5e308], [10**9, 10**9]) == 1.5e308
    assert weighted_mean([-1.5e308, 1.5e308], [3, 1]) == -0.75e308
    assert weighted_mean([1e-320], [2]) == 1e-320
    assert isnan(weighted_mean([nan, 1.0], [1, 1]))
    steps = SGDSteps(loss=torch.sum, batches=[], learning_rate=0.1, samples=1)
    assert steps.told([1.5e308, 1.5e308]) == {"loss": 1.5e308}


def test_weighted_mean_rounds_as_the_plain_formula_does() -> None:
    random = Random(0)
    for _ in range(100):
        values = [random.uniform(-1e6, 1e6) for _ in range(9)]
        weights = [random.randrange(1, 10**6) for _ in range(9)]
        plain = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        assert weighted_mean(values, weights) == plain
