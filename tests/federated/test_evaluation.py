"""Evaluation: metrics of versions, in turn or in a thread, and the condition that ends a federation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.federations import model_of
from torch import nn

from gossamer.errors import LoopError
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.evaluation import Evaluation, Evaluator, StopCondition
from gossamer.federated.model_state import ModelState


def evaluator(function: Any, **options: Any) -> Evaluator:
    model = model_of()
    return Evaluator(function, model, ModelState.of(model), **options)


def test_the_function_is_told_the_version_and_its_round() -> None:
    seen: list[Round] = []

    def looked(model: nn.Module, told: Round) -> Update:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(told)
        return Update(samples=1, metrics={"sum": torch.cat([each.reshape(-1) for each in model.parameters()]).sum()})

    asked = evaluator(looked, config=lambda index: {"at": index})
    assert asked.metrics(3, torch.ones(5, dtype=torch.float64)) == {"sum": 5.0}
    assert (seen[0].index, seen[0].client, seen[0].config) == (2, None, {"at": 2})
    asked.metrics(4, torch.ones(5, dtype=torch.float64))
    assert seen[0].seed != seen[1].seed


def test_what_is_no_update_is_reported() -> None:
    with pytest.raises(LoopError, match="The evaluation returned None"):
        evaluator(lambda model, told: None).metrics(1, torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize(("text", "value", "ends"), [("a>0.5", 0.6, True), (" a <= 1e-3", 0.6, False)])
def test_a_stop_condition_is_read(text: str, value: float, ends: bool) -> None:
    assert StopCondition.read(text).reached({"a": value}) is ends
    assert not StopCondition.read(text).reached({"b": value})
    assert not StopCondition.read(text).reached({"a": float("nan")})
    with pytest.raises(ValueError, match=r"write accuracy>0\.95"):
        StopCondition.read(text + "x")


def test_the_text_of_a_stop_condition_reads_as_the_same_one() -> None:
    assert str(StopCondition.read("accuracy>0.9999999")) == "accuracy>0.9999999"
    with pytest.raises(ValueError, match="would never end"):
        StopCondition.read("accuracy>nan")


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
