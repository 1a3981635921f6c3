"""Wrappers: a compressor inside one gets the tensors that it asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from laws.laws import LAYOUT

from gossamer.algorithms.compressors import Compressor, Feedback, OneBitAdam, PowerSGD, Route, Sharded, Warmup
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.wrapper import without_state
from gossamer.base.aggregation import Aggregation, AggregationResult, State
from gossamer.base.layout import FlatTensors
from gossamer.base.runner import simulate

WRAPPERS = [Feedback, lambda inner: Warmup(inner, steps=2), lambda inner: OneBitAdam(inner=inner)]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_groups_and_shapes_are_the_inner_compressors(wrap: Callable[[Compressor], Compressor]) -> None:
    inner = Route(PowerSGD(rank=1), smallest=8)
    assert [wrap(inner).group(slot) for slot in LAYOUT] == [inner.group(slot) for slot in LAYOUT]
    assert len({inner.group(slot) for slot in LAYOUT}) == 2
    assert wrap(PowerSGD(rank=1)).suits((3, 4))
    assert not wrap(PowerSGD(rank=2)).suits((3, 4))


class OnlyMatrices(Int8):
    def suits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2


def test_a_codec_in_parts_suits_what_the_codec_suits() -> None:
    assert [Sharded(OnlyMatrices()).suits(shape) for shape in ((3, 4), (3,))] == [True, False]


def nothing_remembered() -> Aggregation:
    yield from ()
    return AggregationResult(mean=torch.ones(1), own_contribution=lambda: torch.ones(1))


def test_what_continues_next_to_a_state_leaves_it_as_it_was() -> None:
    state = State({"q": FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))})
    (staged,) = simulate([without_state(state, nothing_remembered())])
    assert staged.next_state is not state  # a commit would else forget its room
    assert {key: packed.flat.data_ptr() for key, packed in staged.next_state.items()} == {
        "q": state["q"].flat.data_ptr()
    }
