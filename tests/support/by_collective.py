"""Aggregations whose means are taken by a table of hops, as the mesh takes them, and not in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.collective_tables import summed, tables_of
from torch import Tensor

from gossamer.algorithms.collectives import Collective
from gossamer.base.aggregation import AggregationResult
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllReduceMean, Coalesced, CollectiveOp, Script


def simulate_by(collective: Collective, scripts: Sequence[Script]) -> list[AggregationResult]:
    """Run one script per worker in lock step; returns their results by rank."""
    answers: Sequence[Any] = [None] * len(scripts)
    ends: list[AggregationResult] = []
    while not ends:
        asked: list[CollectiveOp] = []
        for script, answer in zip(scripts, answers, strict=True):
            try:
                asked.append(script.send(answer))
            except StopIteration as stop:
                ends.append(stop.value)
        answers = _answers(collective, asked) if asked else []
    assert len(ends) == len(scripts)
    return ends


def _answers(collective: Collective, asked: Sequence[CollectiveOp]) -> list[Any]:
    if isinstance(asked[0], Coalesced):
        parts = [_answers(collective, same) for same in zip(*(op.ops for op in asked), strict=True)]  # type: ignore[union-attr]
        return [list(each) for each in zip(*parts, strict=True)]
    if not isinstance(asked[0], AllReduceMean):
        return answer_all(asked)
    mean = _mean(collective, [op.tensors()[0] for op in asked])
    return [mean.clone() for _ in asked]


def _mean(collective: Collective, tensors: Sequence[Tensor]) -> Tensor:
    """The mean that the hops come to: the same bits on every rank."""
    world = len(tensors)
    first, *others = summed(
        tables_of(collective, world), collective.pieces(world), [tensor.float().reshape(-1) for tensor in tensors]
    )
    assert all(torch.equal(first, other) for other in others)
    return (first / world).to(tensors[0].dtype).view(tensors[0].shape)
