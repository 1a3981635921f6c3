"""Hierarchical compression: pieces, numbers, ops and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws.formulas import places
from laws.laws import LAYOUT, Group, check_bytes
from support.between_nodes import BETWEEN, FED_BACK, NODES
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, Hierarchical, PowerSGD, Route, hierarchical
from gossamer.algorithms.compressors.hierarchical import _part, _piece, _Place
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult
from gossamer.base.layout import FlatTensors, Layout, Slot, dense_stride
from gossamer.base.ops import Coalesced, CollectiveOp, InGroup
from gossamer.base.runner import simulate

# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size", "piece"),
    [
        ((12, 20), 2, (6, 20)),
        ((12, 20), 5, (48,)),  # three rows more would be a quarter
        ((50257, 768), 8, (6283, 768)),
        ((1, 1024, 768), 4, (1, 256, 768)),
        ((20,), 8, (3,)),
        ((2, 100), 8, (25,)),
        ((1,), 4, (1,)),
        ((), 4, (1,)),
        ((6, 5, 3, 3), 1, (6, 5, 3, 3)),
    ],
)
def test_a_piece_is_of_rows_where_there_are_enough(shape: tuple[int, ...], size: int, piece: tuple[int, ...]) -> None:
    (slot,) = Layout.of({"w": shape})
    assert _piece(slot, size, 0).shape == piece


@pytest.mark.parametrize("shape", [(4, 8, 3, 3), (8, 4, 2, 2)])
def test_rows_lie_together_in_memory(shape: tuple[int, ...]) -> None:
    last = torch.empty(shape).to(memory_format=torch.channels_last)
    (slot,) = Layout.of({"w": last})
    assert _piece(slot, 2, 0) == Slot("w", (shape[0] // 2, *shape[1:]), 0, dense_stride(last))
    (turned,) = Layout.of({"w": torch.empty(6, 8).T})
    assert _piece(turned, 3, 0).shape == (8, 2)


def test_no_memory_depends_on_what_lies_beside_it() -> None:
    """Sharded's parts do; here a tensor's piece stays its piece in any bucket."""
    alone = _part(Layout.of({"b": (12, 20)}), 3).by_name["b"]
    beside = _part(Layout.of({"a": (7, 5), "b": (12, 20)}), 3).by_name["b"]
    assert (alone.shape, alone.stride) == (beside.shape, beside.stride)


@pytest.mark.parametrize("shapes", [{"w": (3,)}, {"w": (0,)}, {"w": (0,), "v": (5, 2)}, {"w": ()}])
@pytest.mark.parametrize("between", [Dense(), FED_BACK, Feedback(PowerSGD(rank=1)), Route(FED_BACK)], ids=repr)
def test_few_entries(between: Compressor, shapes: dict[str, tuple[int, ...]]) -> None:
    layout = Layout.of(shapes)
    for world, per_node in ((1, 8), (8, 4)):
        group = Group(Hierarchical(between, per_node=per_node), world, layout=layout)
        gradients = [x.round() for x in group.gradients()]
        for staged in group.aggregate(gradients):
            assert staged.mean.shape == (layout.numel,)
            if between == Dense() or world == 1:
                assert torch.equal(staged.mean, torch.stack(gradients).mean(0))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world", "per_node"), NODES)
def test_integers_are_exact(world: int, per_node: int, dtype: torch.dtype) -> None:
    group = Group(Hierarchical(Dense(), per_node=per_node), world, dtype=dtype)
    whole = [torch.randint(-9, 9, (LAYOUT.numel,)).to(dtype) * world for _ in range(world)]
    exact = torch.stack(whole).double().mean(0)
    for staged in group.aggregate(whole):
        assert torch.equal(staged.mean.double(), exact)


def test_halves_are_added_up_in_single_precision() -> None:
    """1 + 2^-9 + 2^-9 + 2^-9 in bfloat16 is 1, if each sum is rounded."""
    group = Group(Hierarchical(Dense(), per_node=4), 8, dtype=torch.bfloat16, layout=Layout.of({"w": (4,)}))
    numbers = [torch.full((4,), 1.0 if rank % 4 == 0 else 2.0**-9, dtype=torch.bfloat16) for rank in range(8)]
    assert group.aggregate(numbers)[0].mean.tolist() == [(1 + 3 * 2.0**-9) / 4] * 4


def overflowing(compressor: Compressor) -> list[AggregationResult]:
    """Numbers that only single precision cannot hold, on one worker of four."""
    group = Group(compressor, 4)
    gradients = [torch.ones(LAYOUT.numel, dtype=torch.float64) for _ in range(4)]
    gradients[2][:5] = 1e300
    return group.aggregate(gradients)


def check_one_opinion(staged: Sequence[AggregationResult]) -> None:
    assert [each.finite for each in staged] == [False] * len(staged)


def test_all_hear_of_what_could_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = Hierarchical(Feedback(Int8(block=16)), per_node=2)
    check_one_opinion(overflowing(compressor))
    check_one_opinion(overflowing(Hierarchical(Dense(dtype="float16"), per_node=2)))
    assert all(each.finite for each in overflowing(Hierarchical(Dense(), per_node=2)))

    def deaf(lost: Sequence[bool], like: Tensor, *others: Any) -> Any:
        yield from every(lost, like, *others)
        return not lost

    every = hierarchical._all_fine
    monkeypatch.setattr(hierarchical, "_all_fine", deaf)  # the other node does not hear of it
    with pytest.raises(AssertionError):
        check_one_opinion(overflowing(compressor))


def spread(compressor: Compressor) -> float:
    """How far apart the means of equal pieces are, for which both places draw."""
    group = Group(compressor, 4, layout=Layout.of({"w": (64,)}))
    (staged, *_) = group.aggregate([torch.linspace(0, 1, 32, dtype=torch.float64).repeat(2)] * 4)
    return float((staged.mean[:32] - staged.mean[32:]).abs().max())


def test_places_draw_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread(Hierarchical(QSGD(levels=1), per_node=2)) > 0

    def everywhere(place: _Place, at: AggregationContext) -> AggregationContext:
        return replace(at, rank=place.node, world=place.nodes)

    monkeypatch.setattr(_Place, "at", everywhere)
    assert spread(Hierarchical(QSGD(levels=1), per_node=2)) == 0


# -- ops and bytes -----------------------------------------------------------------------------------------------------


def words_of(compressor: Compressor, rank: int, world: int) -> list[CollectiveOp]:
    """What a rank says, with the others saying theirs."""
    said: list[CollectiveOp] = []

    def listened(script: Aggregation, each: int) -> Aggregation:
        answer = None
        while True:
            try:
                op = script.send(answer)  # type: ignore[arg-type]
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if each == rank:
                said.append(op)
            answer = yield op

    group = Group(compressor, world)
    simulate(
        [
            listened(compressor.aggregate(FlatTensors(x, LAYOUT), state, group.at(each)), each)
            for each, (x, state) in enumerate(zip(group.gradients(), group.states, strict=True))
        ]
    )
    return said


def groups(op: CollectiveOp) -> set[tuple[int, ...]]:
    if isinstance(op, Coalesced):
        return set().union(*map(groups, op.ops))
    assert isinstance(op, InGroup)
    return {op.ranks}


@pytest.mark.parametrize("between", BETWEEN[:-1], ids=repr)
def test_only_counterparts_talk_between_nodes(between: Compressor) -> None:
    inside, *across, last = [groups(op) for op in words_of(Hierarchical(between, per_node=2), 5, 8)]
    assert inside == last == {(4, 5)}
    assert across == [{(1, 3, 5, 7)}] * len(across)


def test_bytes() -> None:
    padded = {2: 6 * 20 + 10 + 24 + 135 + 1 + 264, 4: 3 * 20 + 5 + 12 + 68 + 1 + 132}
    for per_node, numel in padded.items():
        pieces = [_piece(slot, per_node, 0).numel for slot in LAYOUT]
        assert sum(pieces) == numel
        k = sum(max(1, round(0.1 * size)) for size in pieces)

        def formula(world: int, per_node: int = per_node, numel: int = numel, k: int = k) -> float:
            across = world // per_node - 1
            return 2 * (per_node - 1) * 4 * numel + across * (1 + 4 * k + places(k, numel))

        check_bytes(Hierarchical(FED_BACK, per_node=per_node), 8, formula)
        with pytest.raises(AssertionError, match="formula"):
            check_bytes(Hierarchical(FED_BACK, per_node=per_node), 8, lambda world: 4.0 * sum(LAYOUT.sizes))
