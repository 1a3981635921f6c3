"""Hierarchical compression: the laws over nodes of several workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from laws.laws import LAYOUT, Group, check_in_place, check_own, check_refuses_to_send_nonsense, check_zeros, close
from support.between_nodes import BETWEEN, FED_BACK, NODES
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, Hierarchical, PowerSGD, Route, TopK
from gossamer.algorithms.compressors.hierarchical import _piece
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.layout import FlatTensors, Slot


@pytest.mark.parametrize(("world", "per_node"), NODES)
@pytest.mark.parametrize("between", BETWEEN, ids=repr)
def test_own(between: Compressor, world: int, per_node: int) -> None:
    check_own(Hierarchical(between, per_node=per_node), world)


@pytest.mark.parametrize("between", BETWEEN, ids=repr)
def test_laws_of_one_worker(between: Compressor) -> None:
    check_zeros(Hierarchical(between, per_node=3), 6)
    check_in_place(Hierarchical(between, per_node=2), 4)
    check_refuses_to_send_nonsense(Hierarchical(between, per_node=2))


def test_three_levels() -> None:
    check_own(Hierarchical(Hierarchical(FED_BACK, per_node=2), per_node=2), 8)
    check_conservation(Hierarchical(Hierarchical(FED_BACK, per_node=2), per_node=2), 8, (2, 2))
    check_own(Route(Hierarchical(FED_BACK, per_node=2), rest=Hierarchical(Int8(), per_node=2)), 4)


@dataclass(frozen=True, repr=False)
class Innocent(Hierarchical):
    """Takes no part of what the compressor between nodes lost."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        staged = yield from super().aggregate(x, state, at, out)
        return replace(staged, own_contribution=lambda: x.flat)


def test_own_catches_who_forgets_what_was_lost() -> None:
    with pytest.raises(AssertionError):
        check_own(Innocent(TopK(density=0.1), per_node=2), 4)


# -- conservation ------------------------------------------------------------------------------------------------------


def outstanding(group: Group, sizes: tuple[int, ...]) -> Tensor:
    """The mean over nodes of the pieces that each place still has to send. sizes: of nodes, the outer one first."""
    owed = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for state in group.states:
        for key, packed in state.items():
            if key.endswith("residual"):
                *prefixes, _ = key.split(".")
                where = [int(each.removeprefix("place")) for each in prefixes if each.startswith("place")]
                for name, view in packed.items():
                    _add(owed, LAYOUT.by_name[name], view, sizes, where, group.world)
    return owed


def _add(owed: Tensor, slot: Slot, view: Tensor, sizes: Sequence[int], where: Sequence[int], world: int) -> None:
    """Add a piece of a piece where it lies in the whole."""
    piece, start, length, sharers = slot, 0, slot.numel, 1
    for size, place in zip(sizes, where, strict=True):
        piece, sharers = _piece(piece, size, 0), sharers * size
        start, length = start + place * piece.numel, min(piece.numel, max(length - place * piece.numel, 0))
    slot.flat_view(owed)[start : start + length] += view.reshape(-1)[:length] * sharers / world


def check_conservation(compressor: Compressor, world: int, sizes: tuple[int, ...], steps: int = 8) -> None:
    """What was sent, and what each place still has to send, add up to what was given."""
    group = Group(compressor, world)
    given, sent = torch.zeros(LAYOUT.numel, dtype=torch.float64), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for _ in range(steps):
        gradients = group.gradients()
        given += torch.stack(gradients).mean(0)
        sent += group.aggregate(gradients)[0].mean
    close(sent + outstanding(group, sizes), given, 1e-11)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("between", [FED_BACK, Route(FED_BACK), Feedback(PowerSGD(rank=2))], ids=repr)
def test_conservation(between: Compressor, world: int, per_node: int) -> None:
    check_conservation(Hierarchical(between, per_node=per_node), world, (per_node,))


@dataclass(frozen=True, repr=False)
class Forgetful(Hierarchical):
    """Remembers what it was, not what it has become."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        staged = yield from super().aggregate(x, state, at, out)
        return replace(staged, next_state=State({key: packed.clone() for key, packed in state.items()}))


@pytest.mark.parametrize("twin", [Forgetful(FED_BACK, per_node=2), Hierarchical(TopK(density=0.1), per_node=2)])
def test_conservation_catches(twin: Compressor) -> None:
    with pytest.raises(AssertionError):
        check_conservation(twin, 4, (2,))


def test_memory_is_of_the_pieces_of_a_place() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.bfloat16, device=torch.device("cpu"))
    compressor = Hierarchical(FED_BACK, per_node=2)
    state = compressor.init(like, AggregationContext(rank=3, world=4))
    assert list(state) == ["place1.residual"]
    assert state["place1.residual"].flat.dtype == torch.float32
    assert [slot.shape for slot in state["place1.residual"].layout] == [
        (6, 20),
        (10,),
        (4, 6),
        (3, 5, 3, 3),
        (1,),
        (8, 33),
    ]
    assert compressor.init(like, AggregationContext(rank=1, world=2)) == {}  # a single node
    assert compressor.init(like, AggregationContext()) == {}
