"""Laws of compressors whose ranks send few entries and add them up on their way: shared rows, masks, sums by owner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group
from support.aggregations import aggregate
from support.collective_tables import summed, tables_of
from torch import Tensor

from gossamer.algorithms.collectives import Collective, HalvingDoubling, RingAllReduce
from gossamer.algorithms.compressors import ARCTopK, Compressor, Dense, Feedback, SharedMask, SparseSum, TopK
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllReduceMean, Coalesced, CollectiveOp, Script
from gossamer.errors import NotFinite


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


FEW = [ARCTopK(density=0.02, row=2), SharedMask(density=0.02), SparseSum(TopK(density=0.02))]
SEVERAL = [ARCTopK(density=0.2, row=8), SharedMask(density=1 / 8), SparseSum(TopK(density=0.05))]
SHAPES = [{"w": (1,)}, {"a": (2,), "empty": (0, 3), "b": (3,)}, {"a": (9,), "b": ()}, {"w": (130,)}, {"w": (0,)}]


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("compressor", FEW, ids=repr)
def test_few_entries_or_none(compressor: Compressor, shapes: dict[str, Any], world: int) -> None:
    """Fewer entries than workers, and fewer to send than workers, too."""
    group = Group(Feedback(compressor), world, layout=Layout.of(shapes))
    for _ in range(3):
        staged = group.aggregate(group.gradients())
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert torch.isfinite(staged[0].mean).all()


@pytest.mark.parametrize("wrapped", [ARCTopK(density=1.0), SharedMask(density=1.0)], ids=repr)
@pytest.mark.parametrize("feedback", [False, True])
def test_density_one_is_dense_bit_for_bit(wrapped: Compressor, feedback: bool) -> None:
    group = Group(Feedback(wrapped) if feedback else wrapped, 3, dtype=torch.float32)
    dense = Group(Dense(), 3, dtype=torch.float32)
    for _ in range(3):
        inputs = group.gradients()
        assert torch.equal(group.aggregate(inputs)[0].mean, dense.aggregate(inputs)[0].mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compressor", SEVERAL, ids=repr)
def test_half_precision_is_added_up_in_float32(compressor: Compressor, dtype: torch.dtype) -> None:
    group = Group(Feedback(compressor), 3, dtype=dtype)
    gradients = group.gradients()
    staged = group.aggregate(gradients)
    exact = torch.stack([each.float() for each in gradients]).mean(0)
    waits = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
    assert staged[0].mean.dtype == staged[0].own.dtype == waits.dtype == torch.float32
    torch.testing.assert_close(staged[0].mean + waits, exact, rtol=1e-6, atol=1e-6)
    into = [torch.empty_like(each) for each in gradients]
    told = group.aggregate_into(gradients, into)
    assert all(each.mean.data_ptr() == out.data_ptr() for each, out in zip(told, into, strict=True))
    assert torch.equal(into[0], into[1])


@pytest.mark.parametrize("number", [nan, 3e38])
@pytest.mark.parametrize("compressor", SEVERAL, ids=repr)
def test_a_number_that_cannot_be_sent_is_noticed_before_the_first_operation(
    compressor: Compressor, number: float
) -> None:
    """Also where only its sum with the residual is too large. Nothing is remembered."""
    group = Group(Feedback(compressor), 4, dtype=torch.float32)
    group.aggregate(group.gradients())
    for place in range(0, LAYOUT.numel, 53):
        state = {key: packed.clone() for key, packed in group.states[0].items()}
        before = type(group.states[0])(state)
        before[RESIDUAL].flat[place] = 3e38
        kept = {key: packed.flat.clone() for key, packed in before.items()}
        x = torch.zeros(LAYOUT.numel)
        x[place] = number
        with pytest.raises(NotFinite):
            next(group.compressor.aggregate(FlatTensors(x, LAYOUT), before, group.at(0)))
        assert all(torch.equal(before[key].flat, flat) for key, flat in kept.items())


@pytest.mark.parametrize("collective", [RingAllReduce(), HalvingDoubling()], ids=repr)
@pytest.mark.parametrize("compressor", SEVERAL[:2], ids=repr)
def test_it_is_the_same_by_a_ring_and_by_halving_and_doubling(compressor: Compressor, collective: Any) -> None:
    """Their sums are all-reduces of dense numbers, so any table of hops serves. Integers: every sum is exact."""
    world = 4
    draws = [torch.randint(-9, 9, (LAYOUT.numel,), generator=rng.generator("integers", r)) for r in range(world)]
    inputs, at = [world * each.float() for each in draws], partial(AggregationContext, world=world)
    states = [compressor.init(FlatTensors(x, LAYOUT), at(rank=rank)) for rank, x in enumerate(inputs)]
    for _ in range(2):
        scripts = [
            compressor.aggregate(FlatTensors(x, LAYOUT), state, at(rank=rank))
            for rank, (x, state) in enumerate(zip(inputs, states, strict=True))
        ]
        found, together = simulate_by(collective, scripts), aggregate(compressor, inputs, LAYOUT, states)
        for a, b in zip(found, together, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert all(torch.equal(a.next_state[key].flat, b.next_state[key].flat) for key in b.next_state)
        states = [each.next_state for each in together]
