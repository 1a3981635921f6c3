"""Scalars: numbers, or tensors as they come out of a loop; what is neither is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.virtual_workers import heard
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import events
from gossamer.train.session import scalars


def logged(*named: Any, **metrics: Any) -> dict[str, float]:
    model = nn.Linear(3, 2)
    with heard(events.Logged) as found, gossamer.attach(model, SGD(model.parameters(), 0.1)) as session:
        session.log(*named, **metrics)
    (event,) = found
    return dict(event.values)


def test_a_loss_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of numbers out of a graph, and warnings are errors here."""
    loss = torch.tensor(2.0, requires_grad=True) * 3
    assert logged(loss=loss, rate=0.5, count=3, accuracy=torch.tensor([0.25])) == {
        "loss": 6.0,
        "rate": 0.5,
        "count": 3.0,
        "accuracy": 0.25,
    }
    monkeypatch.setattr(scalars, "number_in", float)
    with pytest.raises(UserWarning):
        logged(loss=torch.tensor(2.0, requires_grad=True) * 3)


def test_a_dict_of_metrics_is_logged_as_keywords_are() -> None:
    assert logged({"train/loss": 2.0, "rate": torch.tensor(0.5)}, epoch=3) == {
        "train/loss": 2.0,
        "rate": 0.5,
        "epoch": 3,
    }
    assert logged(metrics=1.0) == {"metrics": 1.0}


@pytest.mark.parametrize("given", [3.0, torch.tensor(1.0), [("loss", 1.0)], {1: 2.0}])
def test_metrics_without_names_are_refused_with_the_line_to_write(given: Any) -> None:
    with pytest.raises(TypeError, match=r'session\.log\(loss=loss\) or session\.log\(\{"loss": loss\}\)'):
        logged(given)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", "'x'"),
        (None, "None"),
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        (torch.zeros(2, requires_grad=True), r"a tensor of shape \(2,\)"),
    ],
)
def test_what_is_no_number_is_named(value: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"session\.log\(name=\.\.\.\) got {shown}.*session\.log\(name=loss"):
        logged(name=value)


@pytest.mark.parametrize("value", [None, "3", -1, float("nan"), float("inf"), torch.ones(2), [1], 10**400, 1j, 1e308])
def test_what_is_no_weight_is_named(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"a batch weight must be a number of samples.*session\.set_batch_weight\(len\(batch\)\)"
    ):
        scalars.sample_weight(value)


def test_weights_are_numbers_or_tensors_of_one() -> None:
    assert scalars.sample_weight(0) == 0.0
    assert scalars.sample_weight(torch.tensor([3], requires_grad=False)) == 3.0
    assert scalars.sample_weight(torch.tensor(2.5, requires_grad=True)) == 2.5
