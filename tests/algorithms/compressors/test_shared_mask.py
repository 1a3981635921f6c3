"""Shared masks: one mask for all ranks, a step old; what waits is sent in turn; and bytes that stay flat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.laws import LAYOUT, Group
from support.aggregations import priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import (
    Compressor,
    Feedback,
    Hierarchical,
    SharedMask,
    SparseSum,
    TopK,
    point_to_point,
    shared_mask,
)
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.shared_mask import MASK, MaskParts, marked
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import encode_places
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.errors import MalformedError, NotFinite

WORLD = 4
ONE = Layout.of({"w": (16, 8)})
EIGHTH = Feedback(SharedMask(density=1 / 8))


def integers(rank: int, layout: Layout = ONE, world: int = WORLD) -> Tensor:
    """Multiples of the number of workers, so that every sum and mean is exact."""
    return world * torch.randint(-999, 999, (layout.numel,), generator=rng.generator("integers", rank)).float()


# -- the same places everywhere ----------------------------------------------------------------------------------------


def check_same_places(compressor: Compressor, world: int = WORLD, layout: Layout = LAYOUT, steps: int = 5) -> None:
    """Unlike data: every rank sends the entries of the mask of the step before, and all have the same next one."""
    group = Group(compressor, world, layout=layout)
    for step in range(steps):
        before = [state[MASK].flat.clone() for state in group.states]
        staged = group.aggregate(group.gradients())
        for each, state, mask in zip(staged, group.states, before, strict=True):
            assert torch.equal(each.own != 0, staged[0].own != 0), "ranks sent entries of different places"
            assert torch.equal(each.mean, staged[0].mean), "ranks heard different means"
            assert step == 0 or torch.equal(each.own != 0, mask), "the mask was not that of the step before"
            assert torch.equal(state[MASK].flat, group.states[0][MASK].flat), "ranks have different masks"


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_of_unlike_data_send_the_same_places(world: int) -> None:
    check_same_places(Feedback(SharedMask(density=0.1)), world)
    check_same_places(SharedMask(density=0.1), world)


@dataclass(frozen=True, repr=False)
class Hasty(SharedMask):
    """A twin: rank 1 takes up what it has chosen in the same step."""

    def _masked(self, x: Any, wanted: Any, state: Any, at: Any, *args: Any, **how: Any) -> Any:
        if at.rank != 1:
            return super()._masked(x, wanted, state, at, *args, **how)
        found, parts = state[MASK].clone(), self._parts(x, at.world)
        begin, end = parts.bounds(1, at.step)
        best = wanted[begin:end].abs().topk(parts.each).indices + begin
        found.flat[begin:end] = False
        found.flat[best] = True
        return super()._masked(x, wanted, _beside(state, found), at, *args, **how)


@dataclass(frozen=True, repr=False)
class Selfish(SharedMask):
    """A twin: every rank's mask is of its own values."""

    def _masked(self, x: Any, wanted: Any, state: Any, at: Any, *args: Any, **how: Any) -> Any:
        found = FlatTensors(torch.zeros_like(state[MASK].flat), x.layout)
        found.flat[wanted.abs().topk(self._parts(x, at.world).total).indices] = True
        return super()._masked(x, wanted, _beside(state, found), at, *args, **how)


def _beside(state: State, mask: FlatTensors) -> State:
    return State({**state, MASK: mask})


@pytest.mark.parametrize("twin", [Hasty(density=0.1), Selfish(density=0.1)], ids=repr)
def test_the_check_catches_masks_that_are_not_shared(twin: Compressor) -> None:
    with pytest.raises(AssertionError, match="different places"):
        check_same_places(Feedback(twin))


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_two_steps_by_hand() -> None:
    """Eight entries, two ranks, one place each. First 0 and 4; meanwhile rank 0 chooses 2 of what waits, rank 1 5; then
    they change parts, and rank 1 chooses 1 and rank 0 6."""
    layout, both = Layout.of({"w": (8,)}), Feedback(SharedMask(density=1 / 4))
    group = Group(both, 2, layout=layout, dtype=torch.float32)
    inputs = [torch.tensor([9.0, 1, -6, 0, 2, 2, 8, 0]), torch.tensor([1.0, 8, 0, 0, 4, -7, 5, 6])]
    staged = group.aggregate(inputs)
    assert staged[0].mean.tolist() == [5, 0, 0, 0, 3, 0, 0, 0]
    assert staged[1].own.tolist() == [1, 0, 0, 0, 4, 0, 0, 0]
    assert group.states[0][MASK].flat.nonzero().view(-1).tolist() == [2, 5]
    assert group.states[1][RESIDUAL].flat.tolist() == [0, 8, 0, 0, 0, -7, 5, 6]
    staged = group.aggregate([torch.zeros(8)] * 2)
    assert staged[0].mean.tolist() == [0, 0, -3, 0, 0, -2.5, 0, 0]
    assert group.states[0][MASK].flat.nonzero().view(-1).tolist() == [1, 6]


def test_values_and_places_travel_together_and_only_the_former_as_a_mean() -> None:
    script = SharedMask(density=0.1).aggregate(
        FlatTensors(integers(0), ONE), SharedMask(density=0.1).init(FlatTensors(integers(0), ONE), AT), AT
    )
    op = next(script)
    assert isinstance(op, Coalesced)
    assert [type(each) for each in op.ops] == [AllReduceMean, AllGather]
    assert len(op.tensors()[0]) == 16


AT = AggregationContext(world=WORLD)


# -- what waits --------------------------------------------------------------------------------------------------------


def steps_until_sent(compressor: Compressor, world: int, layout: Layout) -> int:
    """Everything that was given arrives, to the last bit; returns how many steps it took."""
    group = Group(compressor, world, layout=layout, dtype=torch.float32)
    inputs = [integers(rank, layout, world) for rank in range(world)]
    given, told = torch.stack(inputs).sum(0), torch.zeros(layout.numel)
    for step in range(200):
        staged = group.aggregate(inputs)
        told += world * staged[0].mean
        waits = torch.stack([state[RESIDUAL].flat for state in group.states])
        assert torch.equal(told + waits.sum(0), given), "something was lost"
        if not waits.any():
            return step + 1
        inputs = [torch.zeros(layout.numel)] * world
    raise AssertionError("something waits for ever")


def test_everything_is_sent_in_as_many_steps_as_masks_tile_the_buffer() -> None:
    assert 8 <= steps_until_sent(EIGHTH, WORLD, ONE) <= 9
    assert steps_until_sent(Feedback(SharedMask(density=0.01)), 3, Layout.of({"w": (50,)})) <= 18


def check_found(world: int = WORLD) -> None:
    """What only one rank has is found in the step in which its part is that rank's, and sent in the next."""
    for owner in range(world):
        inputs = [torch.zeros(ONE.numel) for _ in range(world)]
        inputs[owner][101] = 1000.0
        group = Group(EIGHTH, world, layout=ONE, dtype=torch.float32)
        for _ in range(world + 1):
            staged = group.aggregate(inputs)
            inputs = [torch.zeros(ONE.numel)] * world
            if staged[0].mean[101] == 1000 / world:
                break
        else:
            raise AssertionError("what only one rank has waits for ever")


def test_what_only_one_rank_has_is_found() -> None:
    check_found()


def test_the_check_catches_parts_that_stay_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    taking_turns = shared_mask.MaskParts.bounds
    monkeypatch.setattr(shared_mask.MaskParts, "bounds", lambda self, rank, step: taking_turns(self, rank, 0))
    with pytest.raises(AssertionError, match="for ever"):
        check_found()


def distance(compressor: Compressor, world: int = 5, steps: int = 70) -> float:
    """How far gradient descent on unequal quadratics is from the common minimum, of how far it was at first."""
    group = Group(compressor, world, layout=Layout.of({"w": (20, 30)}))
    goals = [1 + torch.randn(600, generator=rng.generator(rank), dtype=torch.float64) for rank in range(world)]
    goal, w = torch.stack(goals).mean(0), torch.zeros(600, dtype=torch.float64)
    for _ in range(steps):
        w = w - 0.1 * group.aggregate([w - mine for mine in goals])[0].mean
    return float((w - goal).norm() / goal.norm())


def first_places(self: Any, x: Tensor, at: AggregationContext) -> Tensor:
    """A twin chooses without looking."""
    return shared_mask.encode_places(torch.arange(self.each, dtype=torch.int32), self.longest)


def test_it_learns_and_not_where_nobody_looks_at_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, shared = distance(Feedback(TopK(density=0.1))), distance(Feedback(SharedMask(density=0.1)))
    assert shared <= 2.5 * alone
    monkeypatch.setattr(shared_mask.MaskParts, "chosen", first_places)
    assert distance(Feedback(SharedMask(density=0.1))) > 2 * shared


# -- the edges ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_worker_are_flat_in_the_workers() -> None:
    numel, itemsize = 5040 * 100, 4
    layout = Layout.of({"w": (5040, 100)})
    for world in range(2, 9):
        each = 5040 // world
        sent = 2 * (world - 1) * each * itemsize + (world - 1) * shared_mask.coded_bytes(each, numel // world)
        assert priced_bytes(SharedMask(density=0.01), world, layout) == sent
    assert priced_bytes(SharedMask(density=0.01), 1, layout) == 0
    for others, times in ((SharedMask(density=0.01), 1.15), (SparseSum(TopK(density=0.01)), 1.5)):
        assert priced_bytes(others, 64, layout) < times * priced_bytes(others, 8, layout)
    assert priced_bytes(TopK(density=0.01), 64, layout) > 8 * priced_bytes(TopK(density=0.01), 8, layout)


def test_it_remembers_a_byte_for_every_entry_next_to_what_feedback_does() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    kept = EIGHTH.init(like, AT)
    assert {key: packed.flat.nbytes for key, packed in kept.items()} == {RESIDUAL: 4 * 1107, MASK: 1107}


# -- what is not finite ------------------------------------------------------------------------------------------------


def test_a_sum_beyond_the_range_is_refused_where_it_would_travel() -> None:
    large = torch.zeros(ONE.numel)
    large[0] = 2e38
    state = SharedMask(density=0.1).init(FlatTensors(large, ONE), AT)
    with pytest.raises(NotFinite, match="too large for the sum"):
        next(SharedMask(density=0.1).aggregate(FlatTensors(large, ONE), state, AT))


# -- collectives, peers, going on --------------------------------------------------------------------------------------


def test_between_nodes_every_place_has_a_mask_of_its_own_pieces() -> None:
    group = Group(Hierarchical(Feedback(SharedMask(density=0.1)), per_node=2), 6)
    for _ in range(4):
        staged = group.aggregate(group.gradients())
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
    for place in (0, 1):
        masks = [state[f"place{place}.{MASK}"].flat for state in group.states[place::2]]
        assert masks[0].any()
        assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_one_worker_alone_sends_places_too_and_can_be_read() -> None:
    x = FlatTensors(torch.randn(LAYOUT.numel, generator=rng.generator("letter")), LAYOUT)
    compressor, at = SharedMask(density=0.2), AggregationContext(step=3, seed=5)
    state = State({MASK: FlatTensors(torch.rand(LAYOUT.numel) < 0.2, LAYOUT)})
    letter = point_to_point.encode(compressor, x, state, at)
    out = torch.empty(LAYOUT.numel)
    point_to_point.decode(compressor, letter.payload, LAYOUT, at, out)
    assert torch.equal(out, letter.own())
    assert torch.equal(letter.next_state[MASK].flat, state[MASK].flat)


@pytest.mark.parametrize("world", [2, 5, 8])
def test_another_number_of_workers_continues_from_the_mask(world: int) -> None:
    """A few places more or fewer, as whole shares of the workers have it, and the rest is the old mask."""
    before = Group(Feedback(SharedMask(density=0.1)), 4)
    for _ in range(3):
        before.aggregate(before.gradients())
    mask = before.states[0][MASK].flat
    after = Group(Feedback(SharedMask(density=0.1)), world)
    after.states = [State({key: packed.clone() for key, packed in before.states[0].items()}) for _ in range(world)]
    own = after.aggregate(after.gradients())[0].own != 0
    assert int((own ^ mask).sum()) == abs(int(own.sum()) - int(mask.sum())) < max(world, 4)


def test_a_step_that_a_tensor_sat_out_leaves_a_mask_that_is_fitted() -> None:
    """Tensors that no rank used keep their state: the mask is then of two steps, alike on all ranks."""
    group = Group(Feedback(SharedMask(density=0.1)), 3)
    group.aggregate(group.gradients())
    old = [state[MASK].clone() for state in group.states]
    group.aggregate(group.gradients())
    for state, mask in zip(group.states, old, strict=True):
        state[MASK]["kernel"].copy_(mask["kernel"])
    assert int(group.states[0][MASK].flat.sum()) != MaskCount
    staged = group.aggregate(group.gradients())
    assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
    assert int((staged[0].own != 0).sum()) == MaskCount


MaskCount = shared_mask.MaskParts.of(LAYOUT.numel, 3, 0.1).total


# -- equal parts that tile a buffer, masks of one size from any mask, and codes that nobody wrote ----------------------


def masked(n: int, places: list[int]) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool)
    mask[places] = True
    return mask


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.floats(0.001, 1.0))
def test_parts_tile_the_buffer_and_each_has_room_for_its_share(numel: int, world: int, density: float) -> None:
    if numel < world:
        return
    parts = MaskParts.of(numel, world, density)
    bounds = [parts.bounds(rank, world) for rank in range(world)]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == numel
    assert [parts.bounds(rank, 3) for rank in range(world)] == [bounds[(rank + 3) % world] for rank in range(world)]
    assert all(1 <= parts.each <= end - begin <= parts.longest for begin, end in bounds)
    assert min(density * numel, numel // world * world) <= parts.total + 0.5


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1003])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_marks_are_found_eight_at_a_time_as_one_at_a_time(n: int, density: float, start: int) -> None:
    drawn = torch.rand(n + start, generator=rng.generator("mask", n)) < density
    assert torch.equal(marked(drawn[start:]), drawn[start:].nonzero().view(-1))


def test_a_mask_of_the_right_size_is_taken_as_it_is() -> None:
    assert MaskParts.of(40, 4, 0.1).fitted(masked(40, [0, 11, 12, 39])).tolist() == [0, 11, 12, 39]


def test_at_first_the_places_are_evenly_spread() -> None:
    assert MaskParts.of(40, 4, 0.2).fitted(masked(40, [])).tolist() == [0, 5, 10, 15, 20, 25, 30, 35]


@settings(max_examples=80, deadline=None)
@given(st.integers(8, 90), st.integers(1, 8), st.floats(0.01, 1.0), st.data())
def test_a_mask_of_another_size_is_fitted(numel: int, world: int, density: float, data: st.DataObject) -> None:
    parts = MaskParts.of(numel, world, density)
    before = data.draw(st.sets(st.integers(0, numel - 1)))
    found = parts.fitted(masked(numel, sorted(before))).tolist()
    assert found == sorted(set(found))
    assert len(found) == parts.total
    assert set(found) <= before if len(before) >= parts.total else set(found) >= before


@pytest.mark.parametrize("step", [0, 1, 5])
def test_what_every_rank_chose_is_marked_in_its_part(step: int) -> None:
    parts, at = MaskParts.of(23, 3, 0.25), partial(AggregationContext, step=step, world=3)
    x = torch.randn(23, generator=rng.generator("parts"))
    mask = torch.ones(23, dtype=torch.bool)
    parts.mark([(parts.chosen(x, at(rank=rank)),) for rank in range(3)], mask, at(rank=0))
    for rank in range(3):
        begin, end = parts.bounds(rank, step)
        best = x[begin:end].abs().topk(parts.each).indices + begin
        assert mask[begin:end].nonzero().view(-1).add(begin).tolist() == sorted(best.tolist())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda coded: (coded[1:],),
        lambda coded: (coded.int(),),
        lambda coded: (coded, coded),
        lambda coded: (),
        lambda coded: (torch.full_like(coded, 255),),
    ],
)
def test_codes_that_nobody_wrote_are_refused_before_anything_is_written(spoil) -> None:  # type: ignore[no-untyped-def]
    parts, at = MaskParts.of(400, 4, 0.05), partial(AggregationContext, step=9, world=4)
    codes = [parts.chosen(torch.randn(400, generator=rng.generator("codes")), at(rank=rank)) for rank in range(4)]
    mask = masked(400, [1, 2])
    with pytest.raises(MalformedError, match="rank 2 in step 9"):
        parts.mark([(codes[0],), (codes[1],), spoil(codes[2]), (codes[3],)], mask, at(rank=0))
    assert mask.nonzero().view(-1).tolist() == [1, 2]


def test_a_place_beyond_the_part_is_refused() -> None:
    """Parts differ by one entry, and a code has room for the longest."""
    parts = MaskParts.of(10, 4, 0.1)
    assert [parts.bounds(rank, 0)[1] - parts.bounds(rank, 0)[0] for rank in range(4)] == [2, 3, 2, 3]
    codes = [(encode_places(torch.tensor([2], dtype=torch.int32), 3),)] * 4
    with pytest.raises(MalformedError, match=r"rank 0 .*beyond the 2 entries of this rank's part"):
        parts.mark(codes, masked(10, []), AggregationContext(world=4))
