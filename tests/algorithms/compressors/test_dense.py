"""Dense all-reduce, in two bytes where asked: how values are rounded, and what leaves the format's range."""

from __future__ import annotations

import math

import pytest
import torch
from support import aggregations
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllReduceMean
from gossamer.errors import NotFinite

N = 3000
LAYOUT = Layout.of({"w": (N,)})
HALVES = ["bfloat16", "float16"]


def numbers(name: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, generator=rng.generator("dense", str(name)), dtype=torch.float64).to(dtype)


def aggregate(compressor: Compressor, inputs: list[Tensor], outs: list[Tensor | None]) -> list[AggregationResult]:
    return aggregations.aggregate(compressor, inputs, LAYOUT, outs=outs)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_mean_is_that_of_rounded_numbers_rounded_once_more(name: str, given: torch.dtype) -> None:
    dtype, wide = getattr(torch, name), torch.promote_types(given, torch.float32)
    inputs = [numbers(rank, given) for rank in range(3)]
    summed = sum((x.to(dtype).float() for x in inputs), torch.zeros(N))
    for out in (None, torch.empty(N, dtype=given)):
        staged = aggregate(Dense(dtype=name), inputs, [out, None, None])
        due = (summed / 3).to(dtype)
        assert torch.equal(staged[0].mean, due.to(staged[0].mean.dtype))
        assert out is None or staged[0].mean is out
        for each, x in zip(staged, inputs, strict=True):
            assert each.finite
            assert torch.equal(each.own, x.to(dtype).to(each.own.dtype))
            assert each.own.dtype in (wide, given)


@pytest.mark.parametrize("name", HALVES)
def test_own_outlives_an_input_that_is_written_over(name: str) -> None:
    inputs = [numbers(rank) for rank in range(2)]
    kept = [x.clone() for x in inputs]
    for each, x in zip(aggregate(Dense(dtype=name), inputs, list(inputs)), kept, strict=True):
        assert torch.equal(each.own, x.to(getattr(torch, name)).float())


def test_numbers_that_only_their_sum_takes_beyond_float16() -> None:
    staged = aggregate(Dense(dtype="float16"), [torch.full((N,), 30000.0) for _ in range(4)], [None] * 4)
    assert all(each.finite for each in staged)
    assert torch.equal(staged[0].mean, torch.full((N,), 30000.0).half().float())


@pytest.mark.parametrize(("number", "finite"), [(65504.0, True), (65519.0, True), (65520.0, False), (-1e30, False)])
def test_numbers_beyond_float16_mark_the_step_for_all(number: float, finite: bool) -> None:
    inputs = [numbers(rank) for rank in range(3)]
    inputs[1][N - 1] = number
    assert [each.finite for each in aggregate(Dense(dtype="float16"), inputs, [None] * 3)] == [finite] * 3
    assert all(each.finite for each in aggregate(Dense(dtype="bfloat16"), inputs, [None] * 3))


def test_a_mean_beyond_the_buffers_own_range_is_noticed() -> None:
    x = torch.full((N,), 65504.0, dtype=torch.float16)  # bfloat16 rounds it to 65536
    (apart,) = aggregate(Dense(dtype="bfloat16"), [x], [None])
    (within,) = aggregate(Dense(dtype="bfloat16"), [x], [x.clone()])
    assert (apart.finite, within.finite) == (True, False)


@pytest.mark.parametrize("dtype", [None, "float32", *HALVES])
@pytest.mark.parametrize("number", [math.nan, math.inf, torch.finfo(torch.float32).max])
def test_what_cannot_be_sent_is_noticed_before_the_first_word(dtype: str | None, number: float) -> None:
    x = numbers("nonsense")
    x[7] = number
    with pytest.raises(NotFinite):
        next(Dense(dtype=dtype).aggregate(FlatTensors(x, LAYOUT), State(), AggregationContext(world=2)))


@pytest.mark.parametrize("name", HALVES)
def test_half_of_the_bytes_travel_and_the_answer_has_room_of_its_own(name: str) -> None:
    op = next(Dense(dtype=name).aggregate(FlatTensors(numbers("room"), LAYOUT), State(), AggregationContext(world=2)))
    assert isinstance(op, AllReduceMean)
    assert op.out is not None
    assert op.tensor.nbytes == op.out.nbytes == 2 * N
    assert op.tensor.data_ptr() != op.out.data_ptr()
