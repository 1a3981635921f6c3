"""Evaluation: what fails in one version, the function or the record, stops neither the rounds nor later versions."""

from __future__ import annotations

import threading
from typing import Any

import torch
from support.federations import model_of
from torch import nn

from gossamer.federated.client.functions import Round, Update
from gossamer.federated.evaluation import Evaluation, Evaluator
from gossamer.federated.model_state import ModelState

PARAMETERS = torch.ones(5, dtype=torch.float64)


def evaluation(function: Any) -> Evaluation:
    model = model_of()
    return Evaluation(Evaluator(function, model, ModelState.of(model)))


def index_told(model: nn.Module, told: Round) -> Update:
    return Update(samples=1, metrics={"index": told.index})


def test_a_record_that_cannot_be_kept_ends_nothing() -> None:
    told: list[Any] = []

    def fails(metrics: Any) -> None:
        raise BrokenPipeError("nobody reads")

    evaluating = evaluation(index_told)
    evaluating.submit(1, PARAMETERS, fails)
    evaluating.submit(2, PARAMETERS, told.append)
    evaluating.close(10.0)
    assert told == [{"index": 1.0}]


def test_a_function_that_fails_or_tells_nothing_ends_nothing() -> None:
    told: list[Any] = []
    evaluating = evaluation(lambda model, told: None)
    evaluating.submit(1, PARAMETERS, told.append)
    evaluating.close(10.0)
    assert told == [None]


def test_where_it_is_slow_versions_in_between_are_left_out() -> None:
    told: list[Any] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(model: nn.Module, round_: Round) -> Update:
        begun.set()
        go_on.wait(10.0)
        return index_told(model, round_)

    evaluating = evaluation(slow)
    evaluating.submit(1, PARAMETERS, told.append)
    begun.wait(10.0)
    for version in (2, 3, 4, 5):
        evaluating.submit(version, PARAMETERS, told.append)
    go_on.set()
    evaluating.close(10.0)
    assert told == [{"index": 0.0}, None, None, {"index": 3.0}, {"index": 4.0}]
