"""Evaluator: the function sees the version, the round that made it, and its config; gradients are not kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.federations import model_of
from torch import nn

from gossamer.errors import LoopError
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.evaluation import Evaluator
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


def test_what_is_no_update_is_said() -> None:
    with pytest.raises(LoopError, match="The evaluation returned None"):
        evaluator(lambda model, told: None).metrics(1, torch.ones(5, dtype=torch.float64))
