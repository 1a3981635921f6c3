"""Sharded aggregation: fewer bytes, two residuals, one draw for each use, one decision on what is finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, check_conservation, check_own
from support.aggregations import aggregate, priced, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import Codec, Compressor, Feedback, OneBit, Route, Sharded, TopK, TwoBit, sharded
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.compressors.sharded import UNSENT, redivide, settle
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllToAll

CODECS = [Int8(block=16), QSGD(), OneBit(), TwoBit(), TwoBit(adaptive=True), TopK(density=0.1)]


def sent(compressor: Compressor, world: int, numel: int = 2**20) -> float:
    return priced_bytes(compressor, world, Layout.of({"w": (numel,)}))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_hardly_grow_with_the_workers(codec: Codec) -> None:
    message = sent(codec, 2)
    for world in (2, 3, 8, 32):
        assert sent(codec, world) == (world - 1) * message
        both_ways = 2 * (world - 1) / world * message
        assert both_ways <= sent(Sharded(codec), world) <= 1.01 * both_ways + 2 * (world - 1) * 16


def test_a_part_travels_in_two_words() -> None:
    assert [op.op for op in priced(Sharded(Int8()), 4, LAYOUT)] == [AllToAll.name, AllGather.name]


# -- the second residual -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Forgetful(Sharded):
    """Says nothing of what the second encoding lost."""

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        staged = yield from super().aggregate_compensated(x, residual, state, at, out)
        return replace(staged, owes=None, next_state=state)


@dataclass(frozen=True, repr=False)
class Innocent(Sharded):
    """Takes no part of the second encoding's error for its own."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        before = x.flat.clone()
        staged = yield from super().aggregate(x, state, at, out)
        own = self.inner.decoded(self.inner.encode(FlatTensors(before, x.layout), at), x.layout, before)
        return replace(staged, own_contribution=lambda: own)


def test_the_laws_catch_a_second_residual_that_is_lost() -> None:
    with pytest.raises(AssertionError):
        check_conservation(Feedback(Forgetful(Int8(block=16))), 4)
    with pytest.raises(AssertionError):
        check_own(Feedback(Forgetful(Int8(block=16))), 4)
    with pytest.raises(AssertionError):
        check_own(Innocent(Int8(block=16)), 4)


def bias(compressor: Compressor, steps: int = 150) -> float:
    """Constant gradients: how far the mean of all answers is from theirs, relative to the first answer's error."""
    group = Group(compressor, 4, dtype=torch.float32)
    gradients = group.gradients()
    mean = torch.stack(gradients).mean(0)
    answers = torch.stack([group.aggregate(gradients)[0].mean for _ in range(steps)])
    return float((answers.mean(0) - mean).norm() / (answers[0] - mean).norm())


def test_what_is_owed_is_said_later() -> None:
    assert bias(Feedback(Sharded(OneBit(block=16)))) < 0.05
    assert bias(Feedback(Forgetful(OneBit(block=16)))) > 0.2


def test_alone_it_remembers_nothing() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    assert Sharded(Int8()).init(like, AggregationContext(world=4)) == {}
    state = Feedback(Sharded(Int8())).init(like, AggregationContext(rank=1, world=4))
    assert {key: packed.layout.numel for key, packed in state.items()} == {RESIDUAL: LAYOUT.numel, UNSENT: 277}


@pytest.mark.parametrize(
    "compressor", [Feedback(Sharded(Int8(block=16))), Route(Feedback(Sharded(OneBit())))], ids=repr
)
def test_settled_debts_lie_in_the_residuals(compressor: Compressor) -> None:
    group = Group(compressor, 3)
    for _ in range(3):
        group.aggregate(group.gradients())
    before = outstanding(group)
    assert any(packed.flat.any() for state in group.states for key, packed in state.items() if key.endswith(UNSENT))
    for rank, state in enumerate(group.states):
        settle(state, group.at(rank))
        assert not any(packed.flat.any() for key, packed in state.items() if key.endswith(UNSENT))
    torch.testing.assert_close(outstanding(group), before, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "compressor", [Feedback(Sharded(Int8(block=16))), Route(Feedback(Sharded(OneBit())))], ids=repr
)
def test_debts_survive_that_parts_get_other_workers(compressor: Compressor) -> None:
    group = Group(compressor, 4)
    for _ in range(3):
        group.aggregate(group.gradients())
    before = outstanding(group)
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float64, device=torch.device("cpu"))
    for rank, state in enumerate(group.states):
        redivide(state, compressor, like, group.at(rank), replace(group.at(rank), rank=3 - rank))
        fresh = compressor.init(like, replace(group.at(rank), rank=3 - rank))
        assert {key: packed.layout for key, packed in state.items()} == {
            key: packed.layout for key, packed in fresh.items()
        }
    torch.testing.assert_close(outstanding(group), before, rtol=1e-13, atol=1e-13)


def outstanding(group: Group) -> Tensor:
    """The mean residual and all that is owed, by tensor."""
    found = FlatTensors.zeros(LAYOUT, dtype=torch.float64, device=torch.device("cpu"))
    placed = {slot.name: slot.flat_view(found.flat) for slot in LAYOUT}
    begun = dict.fromkeys(placed, 0)
    for state in group.states:
        for key, packed in state.items():
            for slot in packed.layout:
                if key.endswith(UNSENT):
                    start = begun[slot.name]
                    placed[slot.name][start : start + slot.numel] += slot.flat_view(packed.flat)
                    begun[slot.name] += slot.numel
                else:
                    placed[slot.name] += slot.flat_view(packed.flat) / group.world
    return found.flat


# -- randomness --------------------------------------------------------------------------------------------------------


def largest_z(compressor: Compressor, world: int = 2, steps: int = 400) -> float:
    """How far the mean answer is from the mean input, over all entries, in standard errors."""
    group = Group(compressor, world, dtype=torch.float32, layout=Layout.of({"w": (96,)}))
    gradients = group.gradients()
    answers = torch.stack([group.aggregate(gradients)[0].mean for _ in range(steps)]).double()
    errors = answers.std(0) / math.sqrt(steps)
    return float(((answers.mean(0) - torch.stack(gradients).double().mean(0)) / errors).abs().amax())


def test_two_encodings_at_random_are_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Sharded(QSGD(levels=1, block=16))
    assert largest_z(codec) <= 4.5
    monkeypatch.setattr(sharded, "_at", lambda at, stage, number: at)  # the second draws what the first drew
    assert largest_z(codec) > 4.5


def test_parts_of_one_tensor_do_not_share_their_noise() -> None:
    x = FlatTensors(torch.full((64,), 0.3), Layout.of({"w": (64,)}))
    op = next(Sharded(QSGD(levels=1, block=16)).aggregate(x, State(), AggregationContext(world=2)))
    assert not torch.equal(op.parts[0][1], op.parts[1][1])


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int8(), OneBit(), TopK(density=0.1)], ids=repr)
@pytest.mark.parametrize("place", [0, 1, 17, 62])
def test_a_sum_beyond_the_range_is_noticed_by_all(codec: Codec, place: int) -> None:
    layout, states = Layout.of({"w": (63,)}), [State() for _ in range(4)]
    inputs = [torch.ones(63) for _ in range(4)]
    assert all(staged.finite for staged in aggregate(Sharded(codec), inputs, layout, states))
    inputs[2][place] = 3e38
    staged = aggregate(Sharded(codec), inputs, layout, states)
    assert not any(each.finite for each in staged)
    assert not torch.isfinite(staged[0].mean).all()


def test_a_debt_beyond_the_range_is_noticed_by_all() -> None:
    compressor, layout = Feedback(Sharded(Int8())), Layout.of({"w": (64,)})
    blank = FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("cpu"))
    states = [compressor.init(blank, AggregationContext(rank=rank, world=4)) for rank in range(4)]
    states[3][UNSENT].flat.fill_(torch.finfo(torch.float32).max)
    inputs = [torch.full((64,), 2e32) for _ in range(4)]
    assert not any(each.finite for each in aggregate(compressor, inputs, layout, states))


# -- odd sizes and precisions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shapes", [{"w": (1,)}, {"a": (2,), "empty": (0, 3), "b": (3,)}, {"a": (9,), "b": ()}])
def test_more_workers_than_entries(codec: Codec, shapes: dict[str, Any]) -> None:
    group = Group(Feedback(Sharded(codec)), 8, layout=Layout.of(shapes))
    for _ in range(3):
        staged = group.aggregate(group.gradients())
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert torch.isfinite(staged[0].mean).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    group = Group(Feedback(Sharded(Int8())), 3, dtype=dtype)
    gradients = group.gradients()
    staged = group.aggregate(gradients)
    assert staged[0].mean.dtype == staged[0].own.dtype == group.states[0][UNSENT].flat.dtype == torch.float32
    exact = torch.stack([each.float() for each in gradients]).mean(0)
    assert float((staged[0].mean - exact).abs().amax()) < 0.06
    into = [torch.empty_like(each) for each in gradients]
    told = group.aggregate_into(gradients, into)
    assert all(each.mean.data_ptr() == out.data_ptr() for each, out in zip(told, into, strict=True))
    assert torch.equal(into[0], into[1])


def test_pieces_keep_the_names_of_their_tensors() -> None:
    like = FlatTensors.zeros(Layout.of({"a": (2, 3), "b": (5,)}), dtype=torch.float32, device=torch.device("cpu"))
    states = [Sharded(Int8()).init_compensated(like, AggregationContext(rank=rank, world=3)) for rank in range(3)]
    assert [dict(zip(s[UNSENT].layout.names, s[UNSENT].layout.sizes, strict=True)) for s in states] == [
        {"a": 4},
        {"a": 2, "b": 2},
        {"b": 3},
    ]
