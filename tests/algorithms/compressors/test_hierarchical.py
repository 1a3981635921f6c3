"""Hierarchical compression: the laws over nodes of several workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.formulas import places
from laws.laws import (
    LAYOUT,
    Group,
    check_bytes,
    check_in_place,
    check_own,
    check_refuses_to_send_nonsense,
    check_zeros,
    close,
)
from support.virtual_workers import Worker, cluster, network, parameters, train_step
from torch import Tensor

from gossamer.algorithms.compressors import (
    ARCTopK,
    Compressor,
    Dense,
    Feedback,
    Hierarchical,
    OneBit,
    PowerSGD,
    RandomK,
    Route,
    Sharded,
    SharedMask,
    TopK,
    Warmup,
    hierarchical,
)
from gossamer.algorithms.compressors.hierarchical import _part, _piece, _Place
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout, Slot, dense_stride
from gossamer.base.ops import Coalesced, CollectiveOp, InGroup
from gossamer.base.runner import simulate
from gossamer.errors import RecipeError
from gossamer.train import checkpoint

FED_BACK = Feedback(TopK(density=0.1))
BETWEEN: list[Compressor] = [
    Dense(),
    TopK(density=0.1),
    FED_BACK,
    Route(FED_BACK),
    Feedback(OneBit(block=16)),
    Feedback(PowerSGD(rank=2)),
    RandomK(density=0.1),
    Feedback(ARCTopK(density=0.1, row=8)),
    Feedback(SharedMask(density=0.1)),
    QSGD(),
    Sharded(Int8(block=16)),
    Warmup(FED_BACK, steps=2),
    Hierarchical(FED_BACK, per_node=1),
]
NODES = [(4, 2), (6, 3), (4, 4)]  # workers, in each node


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


# -- pieces, numbers, ops and bytes ------------------------------------------------------------------------------------


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


def test_no_memory_depends_on_what_lies_next_to_it() -> None:
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
def test_only_counterparts_communicate_between_nodes(between: Compressor) -> None:
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


# -- what is refused, and what training comes to -----------------------------------------------------------------------


def test_nodes_must_be_full() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    for world in (2, 6, 9):
        with pytest.raises(
            RecipeError,
            match=rf"{world} workers cannot be divided into nodes of 4.*per_node={ {2: 2, 6: 3, 9: 3}[world] }\.",
        ):
            Hierarchical(FED_BACK, per_node=4).init(like, AggregationContext(world=world))


def test_debts_that_move_with_the_workers_are_refused() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RecipeError, match="without the sharding"):
        Hierarchical(Feedback(Sharded(Int8())), per_node=2).init(like, AggregationContext(world=8))
    assert "Sharded" not in repr(resolve("Hierarchical(Int8(block=16), per_node=2)", 64))


# -- training ----------------------------------------------------------------------------------------------------------


def train(worker: Worker, recipe: str, steps: int, folder: Path | None = None, *, load: bool = False) -> Any:
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, resolve(recipe, worker.world))
    if load:
        session.load(folder)
    for step in range(session.steps, session.steps + steps):
        train_step(model, optimizer, step, worker.rank)
    if folder is not None and not load:
        session.save(folder)
    return parameters(model), session.state_dict()["state"]


def trained(recipe: str, world: int, steps: int = 4, folder: Path | None = None, *, load: bool = False) -> list[Any]:
    found = cluster(lambda worker: train(worker, recipe, steps, folder, load=load), world)
    for theirs, _ in found[1:]:
        assert torch.equal(theirs, found[0][0]), "ranks hold different parameters"
    return found


@pytest.mark.parametrize("recipe", ["EveryStep()", "LocalSGD(period=2)", "DiLoCo(period=2)"])
def test_dense_between_nodes_is_the_plain_mean(recipe: str) -> None:
    plain, nodes = trained(recipe, 4), trained(f"{recipe} + Hierarchy(per_node=2, between=Dense())", 4)
    torch.testing.assert_close(nodes[0][0], plain[0][0], rtol=1e-12, atol=1e-12)
    lossy = trained(f"{recipe} + {TOP_K}", 4)
    assert not torch.allclose(lossy[0][0], plain[0][0], rtol=1e-4)


TOP_K = "Hierarchy(per_node=2, between=Route(TopK(density=0.1), smallest=10))"


def test_resume_is_exact(tmp_path: Path) -> None:
    straight = trained(TOP_K, 4, 6)
    trained(TOP_K, 4, 3, tmp_path)
    resumed = trained(TOP_K, 4, 3, tmp_path, load=True)
    assert checkpoint.complete_steps(tmp_path, 0) == [3]
    for (a, remembered), (b, again) in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for name, parts in remembered.items():
            for key, tensor in parts.items():
                assert torch.equal(tensor, again[name][key]), f"{key} of {name} differs"


def mean_owed(states: Sequence[dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """By parameter, for each place the mean over nodes of what it still has to send."""
    found: dict[str, Tensor] = {}
    for name in states[0]:
        keys = sorted({key for state in states for key in state[name]})
        found[name] = torch.cat(
            [torch.stack([state[name][key] for state in states if key in state[name]]).mean(0) for key in keys]
        )
    return found


def test_another_number_of_nodes_continues(tmp_path: Path) -> None:
    before = mean_owed([state for _, state in trained(TOP_K, 4, 5, tmp_path)])
    after = mean_owed([state for _, state in trained(TOP_K, 8, 0, tmp_path, load=True)])
    assert any(owed.any() for owed in before.values())
    for name, owed in before.items():
        torch.testing.assert_close(after[name], owed, rtol=1e-12, atol=1e-15)
