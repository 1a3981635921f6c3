"""Sparse codecs: which entries are chosen, how often, and what a malformed payload does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.aggregations import aggregate
from torch import Tensor

from gossamer.algorithms.compressors import Adaptive, Dense, Feedback, RandomK, TopK
from gossamer.algorithms.compressors.randomk import draw
from gossamer.algorithms.compressors.threshold import Threshold
from gossamer.algorithms.compressors.topk import dearer_than_dense, share
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, encode_places
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.base.runner import simulate
from gossamer.errors import MalformedError, NotFinite

LAYOUT = Layout.of({"matrix": (5, 8), "empty": (0, 3), "one": (1,), "vector": (9,)})
TWO = AggregationContext(world=2)


def numbers(seed: int = 0, layout: Layout = LAYOUT) -> Tensor:
    return torch.randn(layout.numel, generator=rng.generator("numbers", seed))


def room(layout: Layout = LAYOUT) -> Residual:
    return Residual(torch.zeros(layout.numel), torch.full((layout.numel,), math.nan))


def alone(compressor: RandomK, x: Tensor, layout: Layout, step: int) -> Tensor:
    return aggregate(compressor, [x], layout, at=lambda rank: AggregationContext(step=step))[0].own


# -- how many ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "numel", "count"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 49, 1), (0.01, 151, 2), (0.5, 3, 2), (1.0, 7, 7), (1e-9, 7, 1)],
)
def test_at_least_one_entry_of_each_tensor_travels(density: float, numel: int, count: int) -> None:
    assert share(density, numel) == count


@pytest.mark.parametrize("noun", [TopK, RandomK])
@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, math.nan])
def test_densities_that_are_none(noun: type[TopK] | type[RandomK], density: float) -> None:
    with pytest.raises(ValueError, match=rf"got {density}. Write {noun.__name__}\(density=0.01\)"):
        noun(density=density)


# -- TopK ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 0.9, 1.0])
def test_topk_contracts_each_tensor(density: float) -> None:
    top = TopK(density=density)
    for seed in range(20):
        residual = room()
        wanted = numbers(seed) ** 3
        top.encode(FlatTensors(wanted, LAYOUT), TWO, residual)
        for slot, count in zip(LAYOUT, top.counts(LAYOUT.sizes), strict=True):
            left, whole = slot.flat_view(residual.after).square().sum(), slot.flat_view(wanted).square().sum()
            assert left <= (1 - count / max(slot.numel, 1)) * whole * (1 + 1e-6)


def test_topk_takes_the_first_of_equals() -> None:
    layout = Layout.of({"a": (6,), "b": (4,)})
    x = torch.tensor([1.0, -1, 1, 1, -1, 1, 0, 0, 0, 0])
    places, values = TopK(density=0.5).select(FlatTensors(x, layout), TWO)
    assert places.tolist() == [0, 1, 2, 6, 7]
    assert values.tolist() == [1, -1, 1, 0, 0]


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (torch.ones(3), [0, 1, 2]),  # one entry too few, coded correctly
        (torch.ones(4, dtype=torch.int32), [0, 1, 2, 3]),
        (torch.ones(4, 1), [0, 1, 2, 3]),
    ],
)
def test_topk_refuses_what_it_never_sent(values: Tensor, places: list[int]) -> None:
    layout = Layout.of({"a": (40,)})
    out = numbers(0, layout)
    kept = out.clone()
    good = TopK(density=0.1).encode(FlatTensors(out, layout), TWO)
    bad = values, encode_places(torch.tensor(places, dtype=torch.int32), 40)
    with pytest.raises(MalformedError):
        TopK(density=0.1).decode([good, bad], layout, out)
    assert torch.equal(out, kept)


# -- TopK in chunks ------------------------------------------------------------------------------------------------


def chunked_by_hand(x: Tensor, layout: Layout, density: float, chunk: int) -> Tensor:
    """C(x) in a loop over the runs of each tensor."""
    kept = torch.zeros_like(x)
    for slot in layout:
        source, into = slot.flat_view(x).split(chunk), slot.flat_view(kept).split(chunk)
        for run, out in zip(source, into, strict=True):
            if len(run):
                places = run.abs().topk(max(1, round(density * len(run)))).indices
                out[places] = run[places]
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("density", "chunk"), [(0.5, 2), (0.25, 8), (0.2, 7), (0.1, 4096), (1.0, 3), (1e-9, 5)])
def test_each_run_of_a_chunked_topk_keeps_its_own_largest_entries(
    density: float, chunk: int, dtype: torch.dtype
) -> None:
    top, x = TopK(density=density, chunk=chunk), numbers(3).to(dtype)
    residual = Residual(torch.zeros_like(x), torch.full_like(x, math.nan))
    payload = top.encode(FlatTensors(x, LAYOUT), TWO, residual)
    wanted = chunked_by_hand(x, LAYOUT, density, chunk)
    assert torch.equal(top.decoded(payload, LAYOUT, x), wanted)
    assert torch.equal(residual.after, x - wanted)
    assert len(payload[0]) == sum(top.counts(LAYOUT.sizes))


def test_a_chunk_spreads_entries_over_a_tensor_where_topk_takes_one_end() -> None:
    layout = Layout.of({"rising": (64, 64)})
    x = FlatTensors(torch.arange(1.0, 4097.0), layout)
    plain, _ = TopK(density=1 / 64).select(x, TWO)
    spread, _ = TopK(density=1 / 64, chunk=256).select(x, TWO)
    assert plain.tolist() == list(range(4032, 4096))
    assert spread.tolist() == [256 * run + 252 + place for run in range(16) for place in range(4)]


def test_the_published_chunks_send_64_of_4096_with_places_of_8_bits() -> None:
    layout = Layout.of({"matrix": (512, 512)})
    top, x = TopK(density=0.015625, chunk=4096), numbers(4, layout)
    values, coded = top.encode(FlatTensors(x, layout), TWO)
    assert len(values) == 64 * 64
    assert 8 * len(coded) <= 8 * len(values)


def test_a_chunk_of_every_tensor_is_topk_bit_for_bit() -> None:
    x = FlatTensors(numbers(5), LAYOUT)
    whole, cut = (TopK(density=0.3, chunk=chunk).encode(x, TWO) for chunk in (None, 40))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("chunk", [0, -4096])
def test_topk_rejects_a_chunk_without_entries(chunk: int) -> None:
    with pytest.raises(ValueError, match=r"chunk must be a number of entries.*Write TopK\(density=0.1, chunk=4096\)"):
        TopK(density=0.1, chunk=chunk)


def test_chunks_have_counts_of_their_own_so_they_are_not_adaptive() -> None:
    with pytest.raises(ValueError, match=r"Write Adaptive\(TopK\(density=0.01\)\)"):
        Adaptive(TopK(density=0.1, chunk=64))


# -- RandomK: places -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(st.integers(0, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1),
    key=st.integers(0, 2**63 - 1),
)
def test_places_are_distinct_ascending_and_as_many_as_asked(tensors: list[tuple[int, int]], key: int) -> None:
    sizes, counts = [size for size, _ in tensors], [count for _, count in tensors]
    places = draw(sizes, counts, key).tolist()
    assert places == sorted(set(places))
    start = 0
    for size, count in tensors:
        assert sum(start <= place < start + size for place in places) == count
        start += size
    assert len(places) == sum(counts)


def without_turning(sizes: list[int], counts: list[int], key: int) -> Tensor:
    """A twin: one place of each run, and the runs always begin at place 0, so that short runs are favoured."""
    (n,), (k,) = sizes, counts
    low = torch.arange(k) * n // k
    high = (torch.arange(k) + 1) * n // k
    return low + ((high - low) * uniform(key, k)).long()


def worst_frequency(places: list[Tensor], n: int, k: int) -> float:
    """The largest |z| of how often a place was drawn, over all places."""
    counts = torch.stack([torch.bincount(each, minlength=n) for each in places]).sum(0)
    chance = k / n
    return float((counts - len(places) * chance).abs().max() / math.sqrt(len(places) * chance * (1 - chance)))


@pytest.mark.parametrize(("n", "k"), [(50, 20), (37, 1), (16, 8), (50, 49)])
def test_every_place_is_drawn_equally_often(n: int, k: int) -> None:
    keys = [rng.address("frequency", n, trial) for trial in range(3000)]
    assert worst_frequency([draw([n], [k], key) for key in keys], n, k) <= 4.5


def test_the_frequencies_catch_runs_that_are_not_turned() -> None:
    keys = [rng.address("frequency", 50, trial) for trial in range(3000)]
    assert worst_frequency([without_turning([50], [20], key) for key in keys], 50, 20) > 9


def test_places_reach_all_of_a_large_tensor() -> None:
    n, tuner = 2**31 - 1, 400
    places = torch.cat([draw([5, n], [2, 10], rng.address("large", trial))[2:] for trial in range(tuner)]) - 5
    assert 0 <= int(places.min()) <= int(places.max()) < n
    assert len(set((places % 256).tolist())) == 256, "places keep to a grid"
    tenths = torch.bincount(places * 10 // n, minlength=10)
    assert float((tenths - tuner).abs().max()) / math.sqrt(10 * tuner * 0.1 * 0.9) <= 4.5


def test_all_ranks_draw_alike_and_every_step_again() -> None:
    random_k = RandomK(density=0.2)
    first = random_k.places(LAYOUT, AggregationContext(step=3, seed=5, rank=0, world=4))
    assert torch.equal(first, random_k.places(LAYOUT, AggregationContext(step=3, seed=5, rank=2, world=4)))
    others = [AggregationContext(step=4, seed=5, world=4), AggregationContext(step=3, seed=6, world=4)]
    assert not any(torch.equal(first, random_k.places(LAYOUT, at)) for at in others)
    renamed = Layout.of({"other": (50,)})
    assert not torch.equal(random_k.places(Layout.of({"a": (50,)}), TWO), random_k.places(renamed, TWO))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    alone(RandomK(density=0.2), numbers(), LAYOUT, 0)
    assert torch.equal(before, torch.get_rng_state())


# -- RandomK: values -----------------------------------------------------------------------------------------------


def worst_bias(random_k: RandomK, tuner: int = 1500) -> float:
    """The largest |z| of the mean of what is sent against what should be."""
    layout = Layout.of({"a": (12,), "b": (7, 3)})
    x = numbers(1, layout)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    for step in range(tuner):
        total += alone(random_k, x, layout, step)
    rates = [slot.numel / share(random_k.density, slot.numel) for slot in layout for _ in range(slot.numel)]
    spread = x.abs() * ((torch.tensor(rates) - 1) / tuner).sqrt()
    return float(((total / tuner - x).abs() / spread).max())


def test_without_feedback_it_is_unbiased() -> None:
    assert worst_bias(RandomK(density=0.3, feedback=False)) <= 4.5


def test_the_bias_of_unscaled_values_is_seen() -> None:
    assert worst_bias(RandomK(density=0.3), tuner=500) > 9


def test_on_average_it_leaves_the_share_that_was_not_drawn() -> None:
    layout = Layout.of({"a": (33,)})
    x = numbers(2, layout) ** 3
    lost = torch.stack([(x - alone(RandomK(density=0.3), x, layout, step)).square().sum() for step in range(2000)])
    expected = (1 - 10 / 33) * float(x.square().sum())
    assert abs(float(lost.mean()) - expected) / (float(lost.std()) / math.sqrt(len(lost))) <= 4.5


@pytest.mark.parametrize("scaled", [True, False])
def test_feedback_never_meets_scaled_values(scaled: bool) -> None:
    inner = RandomK(density=0.3, feedback=not scaled)
    compressor = Feedback(inner)
    x = FlatTensors(numbers(), LAYOUT)
    state = compressor.init(x, TWO)
    staged: list[AggregationResult] = simulate([compressor.aggregate(x, state, TWO)] * 1)
    places = inner.places(LAYOUT, TWO)
    assert torch.equal(staged[0].own[places], x.flat[places])
    assert torch.equal(staged[0].next_state["residual"].flat + staged[0].own, x.flat)


def test_a_sum_out_of_range_is_refused_before_the_first_word() -> None:
    layout = Layout.of({"a": (4,)})
    large = torch.full((4,), 2e38)
    assert isinstance(next(RandomK(density=1.0).aggregate(FlatTensors(large / 2, layout), State(), TWO)), AllReduceMean)
    with pytest.raises(NotFinite):
        next(RandomK(density=1.0).aggregate(FlatTensors(large, layout), State(), TWO))
    with pytest.raises(NotFinite):
        next(RandomK(density=0.25, feedback=False).aggregate(FlatTensors(large / 2, layout), State(), TWO))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_travels_wide_and_is_rounded_once(dtype: torch.dtype) -> None:
    xs = [numbers(seed).to(dtype) for seed in range(3)]
    random_k, at = RandomK(density=0.5), AggregationContext(world=3)
    over = [x.clone() for x in xs]
    apart = aggregate(random_k, xs, LAYOUT, at=lambda rank: at)
    together = aggregate(random_k, over, LAYOUT, outs=over, at=lambda rank: at)
    places = random_k.places(LAYOUT, at)
    assert apart[0].mean.dtype == torch.float32
    torch.testing.assert_close(apart[0].mean[places], torch.stack(xs).float().mean(0)[places])
    assert torch.equal(together[0].mean, apart[0].mean.to(dtype))


# -- Threshold -----------------------------------------------------------------------------------------------------

TWENTY = Layout.of({"a": (10,), "b": (2, 5)})


def sent(threshold: Threshold, x: Tensor, residual: Residual | None = None) -> Tensor:
    payload = threshold.encode(FlatTensors(x, TWENTY), TWO, residual)
    return threshold.decoded(payload, TWENTY, x)


def test_only_what_exceeds_the_threshold_travels() -> None:
    x = torch.zeros(20)
    x[torch.tensor([2, 9, 10])] = torch.tensor([0.5, -0.51, 3.0])
    residual = room(TWENTY)
    threshold = Threshold(value=0.5, capacity=0.2)
    told = sent(threshold, x, residual)
    assert told.nonzero().view(-1).tolist() == [9, 10]
    assert torch.equal(told + residual.after, x)
    assert float(residual.after[2]) == 0.5
    used, values, _ = threshold.encode(FlatTensors(x, TWENTY), TWO)
    assert used.tolist() == [2]
    assert values.tolist() == [torch.tensor(-0.51).item(), 3.0, 0.0, 0.0]


@pytest.mark.parametrize("aliased", [False, True])
def test_where_more_pass_than_find_room_the_largest_travel(aliased: bool) -> None:
    x = torch.linspace(-1.0, 2.0, 20)
    before = torch.zeros(20)
    residual = Residual(before, before if aliased else torch.empty(20))
    told = sent(Threshold(value=0.1, capacity=0.2), x, residual)
    assert told.nonzero().view(-1).tolist() == [16, 17, 18, 19]
    assert torch.equal(told + residual.after, x)


def test_what_found_no_room_comes_later() -> None:
    threshold = Feedback(Threshold(value=0.1, capacity=0.2))
    x = torch.linspace(1.0, 2.0, 20)
    state = threshold.init(FlatTensors(x, TWENTY), TWO)
    total = torch.zeros(20)
    for step in range(5):
        given_now = x if step == 0 else torch.zeros(20)
        ats = [AggregationContext(step=step, rank=rank, world=2) for rank in range(2)]
        staged = aggregate(threshold, [given_now] * 2, TWENTY, [state] * 2, at=ats.__getitem__)
        state = staged[0].next_state.after(state)
        total += staged[0].mean
    assert torch.equal(total, x)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 20])
def test_payloads_have_one_size(count: int) -> None:
    x = torch.zeros(20)
    x[:count] = 1.0
    payload = Threshold(value=0.5, capacity=0.2).encode(FlatTensors(x, TWENTY), TWO)
    on_meta = Threshold(value=0.5, capacity=0.2).encode(FlatTensors(x.to("meta"), TWENTY), TWO)
    assert [(each.shape, each.dtype) for each in payload] == [(each.shape, each.dtype) for each in on_meta]


@pytest.mark.parametrize("used", [torch.tensor([-1]), torch.tensor([3]), torch.tensor([5]), torch.tensor([2, 2])])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_count_that_no_encoder_wrote_is_refused(used: Tensor, dtype: torch.dtype) -> None:
    threshold = Threshold(value=0.5, capacity=0.2)
    x = torch.zeros(20)
    x[3:5] = 1.0
    good = threshold.encode(FlatTensors(x, TWENTY), TWO)
    kept = x.clone()
    with pytest.raises(MalformedError):
        threshold.decode([good, (used.to(dtype), *good[1:])], TWENTY, x)
    with pytest.raises(MalformedError):
        threshold.decode([good, (good[0], good[1][:3], good[2])], TWENTY, x)
    assert torch.equal(x, kept)


def test_everything_travels_where_that_is_cheaper() -> None:
    layout = Layout.of({"a": (400,)})
    threshold = Threshold(value=2.0, capacity=0.2)
    payload = sum(each.nbytes for each in threshold.encode(FlatTensors(numbers(0, layout), layout), TWO))
    said = {}
    for world in range(2, 20):
        x = FlatTensors(numbers(0, layout), layout)
        plain = next(threshold.aggregate(x, State(), AggregationContext(world=world)))
        fed_back = next(threshold.aggregate_compensated(x, room(layout), State(), AggregationContext(world=world)))
        assert type(plain) is type(fed_back)
        said[world] = type(plain)
    assert said == {world: AllReduceMean if world * payload >= 8 * 400 else AllGather for world in said}
    assert set(said.values()) == {AllReduceMean, AllGather}


def test_what_costs_as_much_as_a_mean_is_one() -> None:
    x = FlatTensors(torch.zeros(100), Layout.of({"a": (100,)}))
    assert [dearer_than_dense(200, x, AggregationContext(world=world)) for world in (2, 3, 4, 5)] == [
        False,
        False,
        True,
        True,
    ]
    assert not dearer_than_dense(10**6, x, AggregationContext(world=1)), "nobody hears anything, so nothing is dear"


def test_where_everything_travels_nothing_is_left() -> None:
    layout = Layout.of({"a": (400,)})
    xs = [numbers(seed, layout) for seed in range(8)]

    def run(compressor: Feedback | Dense) -> list[AggregationResult]:
        ats = [AggregationContext(rank=rank, world=8) for rank in range(8)]
        states = [compressor.init(FlatTensors(x, layout), at) for x, at in zip(xs, ats, strict=True)]
        return aggregate(compressor, xs, layout, states)

    whole = run(Feedback(Threshold(value=2.0, capacity=0.5)))
    assert torch.equal(whole[0].mean, run(Dense())[0].mean)
    for staged, x in zip(whole, xs, strict=True):
        assert torch.equal(staged.own, x)
        assert not staged.next_state["residual"].flat.any()


@pytest.mark.parametrize(
    ("value", "capacity", "line"),
    [
        (-1.0, 0.1, "value=0.01"),
        (math.nan, 0.1, "value=0.01"),
        (1.0, 0.0, "capacity=0.05"),
        (1.0, 1.5, "capacity=0.05"),
    ],
)
def test_thresholds_that_are_none(value: float, capacity: float, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Threshold(value=value, capacity=capacity)
