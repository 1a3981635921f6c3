"""A worker is lost at any operation: survivors go on with the same bits, and the step that broke is made once."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.nightly import once_each
from support.sessions import RECIPES, sgd
from support.virtual_workers import Worker, cluster, loss_of, network, parameters
from torch import Tensor

from gossamer.comm.elastic.change import Change
from gossamer.train.session.group_changes import WorldChange

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
    with session.averaged_parameters(model):
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


@once_each("recipe, heard", [*RECIPES, *LOCAL], ["by nobody", "by all", "by some"])
def test_survivors_agree(recipe: str, heard: str) -> None:
    assert check_survivors_agree(recipe, heard) > 5


@pytest.mark.parametrize("replaces", [True, False])
def test_a_change_that_replaces_the_one_before_is_told_alone(replaces: bool) -> None:
    """Rank 1 is lost, and then rank 2: before the group has made an exchange without rank 1, or after it."""

    def sizes(worker: Worker) -> list[tuple[int, int]]:
        seen: list[WorldChange] = []
        model, optimizer, session = worker.start(network(0), sgd, "Dense()")
        session.on_change(seen.append)
        session._extensions.add(session._changes)  # as in an elastic group
        first, second = (0, 1, 2), (0, 1, 2) if replaces else (0, 2)
        for before, now in ((first, (0, 2)), (second, (0,))):
            session._changes.moved(
                Change(
                    number=2, before=before, now=now, standings={0: session._changes.standing()}, seconds=0.0,
                    completed=1, replaces=replaces and now == (0,),
                )
            )  # fmt: skip
        loss_of(model, 0, 0).backward()
        optimizer.step()
        return [(each.size_before, each.size) for each in seen]

    assert cluster(sizes, 1) == [[(3, 1)] if replaces else [(3, 2), (2, 1)]]
