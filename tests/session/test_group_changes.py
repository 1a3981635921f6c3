"""A worker is lost at any operation: survivors go on with the same bits, and the step that broke is made once."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.sessions import RECIPES, sgd
from support.virtual_workers import Worker, loss_of, network, parameters
from torch import Tensor

STEPS = 4
LOCAL = [
    "LocalSGD(2)",
    "LocalSGD(2) + TopK(0.1)",
    "DiLoCo(2) + Int8()",
    "DiLoCo(4, fragments=2, delay=1)",
    "DelayedAveraging(2)",
    "DelayedAveraging(2) + TopK(0.2)",
    "EveryStep(delay=1)",
    "PostLocalSGD(start=2, period=2)",
]


def trained(recipe: Any, worker: Worker) -> tuple[int, Tensor]:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    with session.merged(model):
        return session.steps, parameters(model)


def check_survivors_agree(recipe: str, heard: str) -> int:
    """At how many operations the worker was lost."""
    deaf = frozenset({0}) if heard == "by some" else frozenset()
    for op in count():
        run = ElasticRun(3, Loss(victim=1, op=op, answered=heard != "by nobody", deaf=deaf))
        first, lost, third = run(partial(trained, recipe))
        if lost is not None:
            return op
        assert first[0] == third[0] == STEPS, op
        assert torch.equal(first[1], third[1]), op
    raise AssertionError


@pytest.mark.parametrize("heard", ["by nobody", "by all", "by some"])
@pytest.mark.parametrize("recipe", [*RECIPES, *LOCAL])
def test_survivors_agree(recipe: str, heard: str) -> None:
    assert check_survivors_agree(recipe, heard) > 5
