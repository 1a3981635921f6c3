"""Shared masks: one mask for all ranks, a step old; what waits is sent in turn; and bytes that stay flat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group
from support.aggregations import aggregate, priced_bytes
from support.by_collective import simulate_by
from torch import Tensor

from gossamer.algorithms.collectives import HalvingDoubling, RingAllReduce
from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    Hierarchical,
    SharedMask,
    SparseSum,
    TopK,
    point_to_point,
    shared_mask,
)
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.shared_mask import MASK
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced
from gossamer.errors import NotFinite

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


@pytest.mark.parametrize("wrapped", [SharedMask(density=1.0), Feedback(SharedMask(density=1.0))], ids=repr)
def test_density_one_is_dense_bit_for_bit(wrapped: Compressor) -> None:
    group, dense = Group(wrapped, 3, dtype=torch.float32), Group(Dense(), 3, dtype=torch.float32)
    for _ in range(3):
        inputs = group.gradients()
        assert torch.equal(group.aggregate(inputs)[0].mean, dense.aggregate(inputs)[0].mean)


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


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize(
    "shapes", [{"w": (1,)}, {"a": (2,), "empty": (0, 3), "b": (3,)}, {"a": (9,), "b": ()}, {"w": (130,)}, {"w": (0,)}]
)
def test_few_entries_or_none(shapes: dict[str, Any], world: int) -> None:
    """Fewer entries than workers, and fewer to send than workers, too."""
    group = Group(Feedback(SharedMask(density=0.02)), world, layout=Layout.of(shapes))
    for _ in range(3):
        staged = group.aggregate(group.gradients())
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert torch.isfinite(staged[0].mean).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    group = Group(EIGHTH, 3, dtype=dtype)
    gradients = group.gradients()
    staged = group.aggregate(gradients)
    exact = torch.stack([each.float() for each in gradients]).mean(0)
    waits = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
    assert staged[0].mean.dtype == torch.float32
    torch.testing.assert_close(staged[0].mean + waits, exact, rtol=1e-6, atol=1e-6)


def test_it_remembers_a_byte_for_every_entry_beside_what_feedback_does() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    kept = EIGHTH.init(like, AT)
    assert {key: packed.flat.nbytes for key, packed in kept.items()} == {RESIDUAL: 4 * 1107, MASK: 1107}


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [nan, 3e38])
def test_a_number_that_cannot_be_sent_is_noticed_before_the_first_word(number: float) -> None:
    group = Group(Feedback(SharedMask(density=0.1)), 4, dtype=torch.float32)
    group.aggregate(group.gradients())
    mask = group.states[0][MASK].flat.clone()
    for place in range(0, LAYOUT.numel, 53):
        state = State({key: packed.clone() for key, packed in group.states[0].items()})
        state[RESIDUAL].flat[place] = 3e38
        before = state[RESIDUAL].flat.clone()
        x = torch.zeros(LAYOUT.numel)
        x[place] = number
        with pytest.raises(NotFinite):
            next(group.compressor.aggregate(FlatTensors(x, LAYOUT), state, group.at(0)))
        assert torch.equal(before, state[RESIDUAL].flat), "something of a step that is skipped is remembered"
        assert torch.equal(mask, state[MASK].flat)


def test_a_sum_beyond_the_range_is_refused_where_it_would_travel() -> None:
    large = torch.zeros(ONE.numel)
    large[0] = 2e38
    state = SharedMask(density=0.1).init(FlatTensors(large, ONE), AT)
    with pytest.raises(NotFinite, match="too large for the sum"):
        next(SharedMask(density=0.1).aggregate(FlatTensors(large, ONE), state, AT))


# -- collectives, peers, going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", [RingAllReduce(), HalvingDoubling()], ids=repr)
def test_it_is_the_same_by_a_ring_and_by_halving_and_doubling(collective: Any) -> None:
    compressor, at = SharedMask(density=0.1), partial(AggregationContext, world=WORLD)
    inputs = [integers(rank, LAYOUT) for rank in range(WORLD)]
    states = [compressor.init(FlatTensors(x, LAYOUT), AT) for x in inputs]
    for _ in range(2):
        scripts = [
            compressor.aggregate(FlatTensors(x, LAYOUT), state, at(rank=rank))
            for rank, (x, state) in enumerate(zip(inputs, states, strict=True))
        ]
        found, together = simulate_by(collective, scripts), aggregate(compressor, inputs, LAYOUT, states)
        for a, b in zip(found, together, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.next_state[MASK].flat, b.next_state[MASK].flat)
        states = [each.next_state for each in together]


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


def test_going_on_gives_the_same_bits() -> None:
    whole, part, resumed = (Group(Feedback(SharedMask(density=0.1)), 3) for _ in range(3))
    means = [whole.aggregate(whole.gradients())[0].mean for _ in range(7)]
    for _ in range(3):
        part.aggregate(part.gradients())
    resumed.step = part.step
    resumed.states = [State({key: packed.clone() for key, packed in state.items()}) for state in part.states]
    forgetful = Group(Feedback(SharedMask(density=0.1)), 3)
    forgetful.step = part.step
    forgetful.states = [
        State({**state, MASK: FlatTensors(torch.zeros_like(state[MASK].flat), LAYOUT)}) for state in part.states
    ]
    assert not torch.equal(forgetful.aggregate(forgetful.gradients())[0].mean, means[3])
    for mean in means[3:]:
        assert torch.equal(resumed.aggregate(resumed.gradients())[0].mean, mean)


@pytest.mark.parametrize("world", [2, 5, 8])
def test_another_number_of_workers_goes_on_from_the_mask(world: int) -> None:
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
