"""Sparse all-reduce: nothing lost whatever overlaps, the same training, and no message taken that nobody wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, check_conservation, check_own, perform_together
from support.aggregations import aggregate, priced, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    RandomK,
    Sharded,
    SparseSum,
    TopK,
)
from gossamer.algorithms.compressors import sparse_allreduce as module
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.sparse_allreduce import Regions
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import coded_bytes
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Payload
from gossamer.errors import MalformedError

SUM = Feedback(SparseSum(TopK(density=0.01)))


# -- nothing is lost ---------------------------------------------------------------------------------------------------


NUMEL, WORLD = 4096, 4
ONE = Layout.of({"w": (NUMEL,)})
TENTH = Feedback(SparseSum(TopK(density=0.05)))


def supports(pattern: str) -> list[Tensor]:
    """Which entries each worker has: those of nobody else, half of them everyone's, the same, or one region's."""
    order = torch.randperm(NUMEL, generator=rng.generator("supports"))
    if pattern == "one region":
        drawn = Regions.drawn(FlatTensors(torch.empty(NUMEL), ONE), AggregationContext(seed=7, world=WORLD))
        return [drawn.members(0, torch.device("cpu"))[:205]] * WORLD
    shared = {"apart": 0, "half": 102, "same": 205}[pattern]
    return [torch.cat([order[:shared], order[205 * (r + 1) :][: 205 - shared]]) for r in range(WORLD)]


PATTERNS = ["apart", "half", "same", "one region"]


def integers(pattern: str) -> list[Tensor]:
    """Multiples of the number of workers: every sum and mean is exact, in any order."""
    found = []
    for rank, places in enumerate(supports(pattern)):
        draws = torch.randint(1, 1000, (len(places),), generator=rng.generator("integers", rank))
        found.append(torch.zeros(NUMEL).index_copy_(0, places, WORLD * draws.float()))
    return found


def check_exact(compressor: Compressor, pattern: str, steps: int = 40) -> int:
    """What was told and what waits is what was given, to the last bit, after every step; returns how many it took."""
    group = Group(compressor, WORLD, layout=ONE, dtype=torch.float32)
    inputs = integers(pattern)
    given, total = torch.stack(inputs).sum(0), torch.zeros(NUMEL)
    for step in range(steps):
        before = [state[RESIDUAL].flat.clone() for state in group.states]
        staged = group.aggregate(inputs)
        own = torch.stack([each.own for each in staged])
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert torch.equal(own.sum(0), WORLD * staged[0].mean), "own is not what was told"
        for x, old, mine, state in zip(inputs, before, own, group.states, strict=True):
            assert torch.equal(state[RESIDUAL].flat, x + old - mine)
        total += WORLD * staged[0].mean
        waits = torch.stack([state[RESIDUAL].flat for state in group.states])
        assert torch.equal(total + waits.sum(0), given), "something was lost"
        if not waits.any():
            assert torch.equal(total, given)
            return step + 1
        inputs = [torch.zeros(NUMEL)] * WORLD
    raise AssertionError("something waits for ever")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_lost_whatever_overlaps_or_crowds(pattern: str) -> None:
    check_exact(TENTH, pattern)


def test_the_same_entries_are_told_as_soon_as_the_regions_are_large_enough() -> None:
    assert check_exact(TENTH, "same") <= 4 < check_exact(TENTH, "one region")


def test_what_crowds_one_region_is_told_sooner_where_regions_move(monkeypatch: pytest.MonkeyPatch) -> None:
    still = check_exact(TENTH, "one region")
    monkeypatch.setattr(module, "STEPS", 1)
    assert check_exact(TENTH, "one region") < still


def drops_sums(sums: Tensor, finite: bool, drawn: Regions, kept: int) -> tuple[Tensor, ...]:
    """The owner forgets what it does not tell."""
    payload = LARGEST_SUMS(sums, finite, drawn, kept)
    sums.zero_()
    return payload


class CutShort(module.Entries):
    """Clears what found no room like what was sent."""

    def messages(self, rows: int, room: int) -> tuple[Payload, ...]:
        values, within = (each.split(self.counts) for each in (self.values, self.rows))
        cut = torch.cat([each[:room] for each in within]), torch.cat([each[:room] for each in values])
        return module.Entries(self.places, *cut, tuple(min(room, count) for count in self.counts)).messages(rows, room)


def clears_all(drawn: Regions, places: Tensor, values: Tensor, room: int) -> module.Entries:
    found = ENTRIES(drawn, places, values, len(places))
    return CutShort(found.places, found.rows, found.values, found.counts)


LARGEST_SUMS, ENTRIES = module._largest_sums, module._entries


@pytest.mark.parametrize(("name", "twin"), [("_largest_sums", drops_sums), ("_entries", clears_all)])
def test_the_check_catches_what_is_lost(name: str, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, twin)
    with pytest.raises(AssertionError, match="own is not what was told"):
        check_exact(TENTH, "one region")


def test_the_laws_catch_sums_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_largest_sums", drops_sums)
    with pytest.raises(AssertionError):
        check_own(SparseSum(TopK(density=0.1)), 4)
    with pytest.raises(AssertionError):
        check_conservation(Feedback(SparseSum(TopK(density=0.1))), 4)


# -- training ----------------------------------------------------------------------------------------------------------


def distance(compressor: Compressor, world: int = 5, steps: int = 70) -> float:
    """How far gradient descent on unequal quadratics is from the common minimum, of how far it was at first."""
    group = Group(compressor, world, layout=Layout.of({"w": (20, 30)}))
    goals = [1 + 3 * torch.randn(600, generator=rng.generator(rank), dtype=torch.float64) for rank in range(world)]
    goal, w = torch.stack(goals).mean(0), torch.zeros(600, dtype=torch.float64)
    for _ in range(steps):
        w = w - 0.1 * group.aggregate([w - mine for mine in goals])[0].mean
    return float((w - goal).norm() / goal.norm())


def test_it_trains_as_its_choice_does_and_not_where_sums_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, summed_up = (distance(Feedback(inner)) for inner in (TopK(density=0.2), SparseSum(TopK(density=0.2))))
    assert summed_up <= 1.25 * alone
    monkeypatch.setattr(module, "_largest_sums", drops_sums)
    assert distance(Feedback(SparseSum(TopK(density=0.2)))) > 1.75 * alone


def test_regions_change_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 3)
    first, later = (Group(Feedback(SparseSum(TopK(density=0.05))), 3) for _ in range(2))
    inputs, later.step = first.gradients(), 3
    assert not torch.equal(first.aggregate(inputs)[0].mean, later.aggregate(inputs)[0].mean)


def test_it_remembers_no_more_than_feedback_does() -> None:
    like = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    assert SparseSum(TopK(density=0.1)).init(like, AggregationContext(world=4)) == {}
    assert {key: packed.layout for key, packed in SUM.init(like, AggregationContext(world=4)).items()} == {
        RESIDUAL: LAYOUT
    }


# -- what is not finite ------------------------------------------------------------------------------------------------


def check_noticed(place: int, rank: int) -> None:
    """Whoever adds it up, and wherever it comes from: also where only the sum of two leaves the range."""
    layout, states = Layout.of({"w": (256,)}), [State() for _ in range(4)]
    inputs = [torch.ones(256) for _ in range(4)]
    compressor = SparseSum(TopK(density=0.1))
    assert all(staged.finite for staged in aggregate(compressor, inputs, layout, states))
    inputs[rank][place] = inputs[1][place] = 3e38
    assert not any(staged.finite for staged in aggregate(compressor, inputs, layout, states))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("place", [0, 1, 17, 62, 255])
def test_a_sum_beyond_the_range_is_noticed_by_all(place: int, rank: int) -> None:
    check_noticed(place, rank)


def tells_zeros(sums: Tensor, finite: bool, drawn: Regions, kept: int) -> tuple[Tensor, ...]:
    values, coded = LARGEST_SUMS(sums, finite, drawn, kept)
    return values.where(values < 1e38, 0), coded


def test_the_check_catches_an_owner_that_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_largest_sums", tells_zeros)
    with pytest.raises(AssertionError):
        check_noticed(17, 0)


# -- odd sizes and precisions ------------------------------------------------------------------------------------------


def test_every_size_is_conserved() -> None:
    """Blocks and groups of all sizes, cut anywhere."""
    for numel in range(30, 700, 67):
        group = Group(Feedback(SparseSum(TopK(density=0.03))), 5, layout=Layout.of({"w": (numel,)}))
        sent, given = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for _ in range(3):
            gradients = group.gradients()
            given += torch.stack(gradients).mean(0)
            sent += group.aggregate(gradients)[0].mean
        waits = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
        torch.testing.assert_close(sent + waits, given, rtol=1e-13, atol=1e-13)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Int8(), Dense(), RandomK(density=0.1), Sharded(Int8())], ids=repr)
def test_the_inner_must_choose(inner: Compressor) -> None:
    with pytest.raises(ValueError, match=r"selects a fixed number .* Write SparseSum\(TopK\(density=0.01\)\)"):
        SparseSum(inner)  # type: ignore[arg-type]


def test_it_wants_feedback_as_its_choice_does() -> None:
    assert SparseSum(TopK(density=0.1)).wants_feedback
    assert not SparseSum(TopK(density=0.1, feedback=False)).wants_feedback


@pytest.mark.parametrize(
    "spoil",
    [
        lambda used, values, coded: (used + 1000, values, coded),
        lambda used, values, coded: (-1 - used, values, coded),
        lambda used, values, coded: (used.long(), values, coded),
        lambda used, values, coded: (used, values[1:], coded),
        lambda used, values, coded: (used, values.int(), coded),
        lambda used, values, coded: (used, values, coded[1:]),
        lambda used, values, coded: (used, values, torch.full_like(coded, 255)),
    ],
)
def test_messages_that_nobody_wrote_are_refused(spoil: Any) -> None:
    script = TENTH.inner.aggregate(FlatTensors(torch.arange(1107.0), LAYOUT), State(), AggregationContext(world=4))
    message = next(script).parts[0]
    with pytest.raises(MalformedError):
        script.send([message, spoil(*message), message, message])


def test_a_row_beyond_the_region_is_refused() -> None:
    """The kernels do not look again where they write."""
    drawn = next(r for r in (Regions(100, 4, key) for key in range(99)) if len(r.members(0, torch.device("cpu"))) < 32)
    mine = torch.zeros(len(drawn.members(0, torch.device("cpu"))))
    rows = torch.tensor([drawn.rows - 1], dtype=torch.int32)
    message = torch.ones(1, dtype=torch.int32), torch.ones(1), module.encode_places(rows, drawn.rows)
    with pytest.raises(MalformedError, match="beyond the"):
        module._added(mine, drawn.rows, 1, [message], torch.empty_like(mine))


# -- they do not grow with the workers, and the dense mean is taken where that is cheaper ------------------------------


MILLION = Layout.of({"w": (2**20,)})
META: Any = {"dtype": torch.float32, "device": torch.device("meta")}


def said(compressor: Compressor, world: int, layout: Layout = MILLION) -> list[Any]:
    return priced(compressor, world, layout)


def sent(compressor: Compressor, world: int, layout: Layout = MILLION) -> float:
    return priced_bytes(compressor, world, layout)


# -- bytes -------------------------------------------------------------------------------------------------------------


def check_flat(compressor: Compressor) -> None:
    k = round(0.01 * 2**20)
    found = [sent(compressor, world) / ((world - 1) / world) for world in (4, 16, 64, 256)]
    assert max(found) <= 24 * k, f"{max(found) / k} bytes an entry"
    assert max(found) <= 1.25 * min(found), "bytes grow with the workers"


def test_bytes_hardly_grow_with_the_workers() -> None:
    check_flat(SUM)
    with pytest.raises(AssertionError):
        check_flat(Feedback(TopK(density=0.01)))


def test_the_bound_holds_wherever_a_region_gets_forty_entries() -> None:
    for density in (0.1, 0.01, 0.001, 0.0001):
        k = round(density * 2**20)
        for world in (world for world in (2, 3, 8, 64, 256) if k >= 40 * world):
            assert sent(SparseSum(TopK(density=density)), world) <= 24 * k * (world - 1) / world


def test_a_sum_travels_in_two_words() -> None:
    assert [op.op for op in said(SUM, 4)] == [AllToAll.name, AllGather.name]


@pytest.mark.parametrize("world", [6, 7])
def test_what_is_priced_is_sent(world: int) -> None:
    compressor = Feedback(SparseSum(TopK(density=0.05)))
    assert {done.bytes_sent for done in perform_together(compressor, world)} == {sent(compressor, world, LAYOUT)}


# -- dense where that is cheaper ---------------------------------------------------------------------------------------


def over_dense(numel: int, world: int, density: float) -> float:
    """By how many bytes a message to one other worker exceeds its share of a dense mean, for one tensor."""
    choice, x = SparseSum(TopK(density=density)), FlatTensors.zeros(Layout.of({"w": (numel,)}), **META)
    rows = Regions(numel, world).rows
    return 4 + sum(4 * room + coded_bytes(room, rows) for room in choice.rooms(x, world)) - 2 * 4 * numel / world


def check_crossing() -> None:
    most = SparseSum(TopK(density=0.7))
    over = {numel: over_dense(numel, 4, 0.7) for numel in range(16, 3000)}
    tie = next(numel for numel in over if over[numel] == 0)
    dearer, cheaper = (next(n for n in over if sign * over[n] > 0) for sign in (1, -1))
    for numel, op in ((tie, AllReduceMean), (dearer, AllReduceMean), (cheaper, AllToAll)):
        layout = Layout.of({"w": (numel,)})
        assert said(Feedback(most), 4, layout)[0].op == said(most, 4, layout)[0].op == op.name
        assert (sent(most, 4, layout) == sent(Dense(), 4, layout)) == (op is AllReduceMean)


def test_it_is_the_dense_mean_where_that_costs_as_much_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    check_crossing()
    strict = lambda payload_bytes, x, at: at.world * payload_bytes > 2 * 4 * x.layout.numel  # noqa: E731
    monkeypatch.setattr(module, "dearer_than_dense", strict)
    with pytest.raises(AssertionError):
        check_crossing()


def test_a_dense_mean_leaves_nothing_and_pays_what_waited() -> None:
    group = Group(Feedback(SparseSum(TopK(density=1.0))), 3)
    for rank, state in enumerate(group.states):
        state[RESIDUAL].flat.fill_(float(3 * rank))
    staged = group.aggregate([torch.ones(LAYOUT.numel, dtype=torch.float64)] * 3)
    assert torch.equal(staged[0].mean, torch.full_like(staged[0].mean, 4.0))
    assert not any(state[RESIDUAL].flat.any() for state in group.states)
