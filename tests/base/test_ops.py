"""Collective operations: what each says about itself agrees with the reference semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.base.coalesce import coalesce
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Script,
)
from gossamer.base.runner import simulate

WORLD = 3
X, Y = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.float16)
GATHER, MIX = AllGather((X, Y)), NeighborAllGather((X,), tuple((peer, 1 / 3) for peer in range(WORLD)))
OPS: list[CollectiveOp] = [
    AllReduceMean(X),
    GATHER,
    AllToAll(((X,),) * WORLD),
    MIX,
    InGroup((0, 1, 2), GATHER),
    Coalesced((AllReduceMean(Y), MIX, InGroup((0, 1, 2), AllReduceMean(X)))),
]


def shapes(answer: Any) -> Any:
    return answer.shape if isinstance(answer, torch.Tensor) else [shapes(each) for each in answer]


def ask(op: CollectiveOp) -> Script:
    return (yield op)


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_an_operation_knows_its_tensors_bytes_and_answer(op: CollectiveOp) -> None:
    assert shapes(op.meta_answer(WORLD, 0)) == shapes(answer_all([op] * WORLD)[0])
    assert op.map(lambda tensor: tensor) == op
    doubled = op.map(lambda tensor: torch.cat([tensor, tensor]))
    assert [each.numel() for each in doubled.tensors()] == [2 * each.numel() for each in op.tensors()]
    assert doubled.bytes_sent(WORLD) == 2 * op.bytes_sent(WORLD) > 0
    assert sum(each.bytes_sent(WORLD) for each in op.concurrent()) == op.bytes_sent(WORLD)


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_coalesced_operations_are_answered_as_single_ones(op: CollectiveOp) -> None:
    alone, together = (simulate([script() for _ in range(WORLD)]) for script in (lambda: ask(op), lambda: twice(op)))
    assert together == [[same(answer), same(answer)] for answer in alone]


def twice(op: CollectiveOp) -> Script:
    return [same(answer) for answer in (yield from coalesce([ask(op), ask(op)]))]


def same(answer: Any) -> Any:
    """An answer as numbers, to be compared."""
    return answer.tolist() if isinstance(answer, torch.Tensor) else [same(each) for each in answer]
