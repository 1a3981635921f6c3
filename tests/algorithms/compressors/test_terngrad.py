"""TernGrad: unbiased, whole numbers in the sum, one scale for the group; and what clipping does to that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from laws.unbiased import check_unbiased, draws_of
from support.aggregations import aggregate
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, Route, TernGrad
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.kernels import ternary_decode, ternary_encode
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, Coalesced
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite

SPREAD = torch.linspace(-1.37, 1.61, 64)
OUTLIER = torch.cat([torch.linspace(-0.5, 0.5, 63), torch.tensor([-7.0])])


def together(compressor: Compressor, inputs: Sequence[Tensor], seed: int = 0) -> list[AggregationResult]:
    """One aggregation of one tensor per worker."""
    layout, world = Layout.of({"x": (len(inputs[0]),)}), len(inputs)
    return aggregate(compressor, inputs, layout, at=lambda rank: AggregationContext(seed=seed, rank=rank, world=world))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("per_byte", [4, 5])
@pytest.mark.parametrize("x", [SPREAD, OUTLIER], ids=["spread", "outlier"])
def test_unbiased(x: Tensor, per_byte: int) -> None:
    check_unbiased(TernGrad(per_byte=per_byte), x)


def test_clipping_is_biased_on_heavy_tails() -> None:
    """An entry above the clip counts as the clip, every time; the others stay right."""
    with pytest.raises(AssertionError, match="wrong on average"):
        check_unbiased(TernGrad(clip=2.5), OUTLIER, draws=4000)
    drawn = draws_of(TernGrad(clip=2.5), OUTLIER, 4000)
    clip = 2.5 * float(OUTLIER.square().mean().sqrt())
    assert clip < 7
    assert float(drawn[:, -1].mean()) == pytest.approx(-clip, rel=1e-6)
    assert float(drawn[:, -1].std()) == 0
    check_unbiased(TernGrad(clip=2.5), SPREAD)  # nothing reaches 2.5 sigma


def test_variance_is_what_the_law_says() -> None:
    x = normal(512).double()
    error = (draws_of(TernGrad(), x, 2000) - x).square().sum(1)
    expected = float(x.abs().max() * x.abs().sum() - x.square().sum())
    assert abs(float(error.mean()) - expected) <= 4.5 * float(error.std()) / 2000**0.5


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_sums_are_whole_numbers(world: int) -> None:
    inputs = [normal(300, seed=rank) * (rank + 1) for rank in range(world)]
    staged = together(TernGrad(), inputs)
    scale = torch.stack(inputs).abs().max()
    trits = torch.stack([each.own for each in staged]) / scale
    assert set(trits.unique().tolist()) <= {-1.0, 0.0, 1.0}, "workers scale by different numbers"
    exact = scale * trits.sum(0) / world
    assert all(torch.equal(each.mean, exact) for each in staged)


def test_order_does_not_matter() -> None:
    sizes, scales = (1000,), torch.tensor([0.1234567])
    payloads = [(ternary_encode(normal(1000, seed=k) * 0.04, sizes, scales, k, 5),) for k in range(9)]
    means = [torch.empty(1000), torch.empty(1000)]
    for mean, order in zip(means, (payloads, payloads[::-1]), strict=True):
        ternary_decode(order, scales, sizes, 5, mean, 9)
    assert torch.equal(*means)


def test_what_is_as_large_as_the_scale_always_travels() -> None:
    for seed in range(50):
        staged = together(TernGrad(), [torch.tensor([0.0, 3.0, -3.0]), torch.tensor([0.0, 0.5, -1.0])], seed)
        assert staged[0].own.tolist() == [0.0, 3.0, -3.0]


def test_two_messages_and_nonsense_before_the_first() -> None:
    layout = Layout.of({"x": (64,)})
    script = TernGrad().aggregate(FlatTensors(SPREAD, layout), State(), AggregationContext(world=1))
    first = next(script)
    assert isinstance(first, AllGather)
    assert [t.tolist() for t in first.payload] == [[pytest.approx(1.61)]]
    second = script.send([first.payload])
    assert isinstance(second, AllGather)
    assert [(t.dtype, len(t)) for t in second.payload] == [(torch.uint8, 13)]
    for number in (math.nan, math.inf, 1e300):
        bad = SPREAD.double()
        bad[3] = number
        for compressor in (TernGrad(), TernGrad(clip=2.5)):
            with pytest.raises(NotFinite):
                next(compressor.aggregate(FlatTensors(bad, layout), State(), AggregationContext()))


def test_sums_that_could_overflow_are_noticed_by_all() -> None:
    staged = together(TernGrad(), [torch.full((8,), 3e38), torch.ones(8), torch.ones(8)])
    assert [each.finite for each in staged] == [False] * 3
    half = torch.full((8,), 60000.0, dtype=torch.float16)
    layout = Layout.of({"x": (8,)})
    script = TernGrad().aggregate(FlatTensors(half, layout), State(), AggregationContext(), half)
    (one,) = simulate([script])
    assert one.finite
    assert one.mean is half


def test_clip_leaves_equal_entries_and_single_ones_alone() -> None:
    layout = Layout.of({"equal": (50,), "one": (1,), "none": (0,), "zeros": (9,)})
    x = FlatTensors(torch.cat([torch.full((50,), -0.3), torch.tensor([5.0]), torch.zeros(9)]), layout)
    (staged,) = simulate([TernGrad(clip=1.0).aggregate(x, State(), AggregationContext())])
    assert torch.allclose(staged.mean, x.flat)


def test_clip_counts_root_mean_squares() -> None:
    layout = Layout.of({"none": (0,), "large": (5000,), "small": (9,)})
    x = FlatTensors(normal(5009) * 1e30, layout)
    first = next(TernGrad(clip=0.5).aggregate(x, State(), AggregationContext()))
    assert isinstance(first, AllGather)
    found = [0.5 * span.double().square().mean().sqrt() for span in x.flat.split([5000, 9])]
    torch.testing.assert_close(first.payload[0][1:], torch.stack(found).float())
    assert float(first.payload[0][0]) == 0


def residual_growth(compressor: Compressor, steps: int = 60) -> float:
    """The residual's size after `steps`, in sizes of what is given each step."""
    layout = Layout.of({"x": (1024,)})
    state = compressor.init(FlatTensors(torch.zeros(1024), layout), AggregationContext())
    for step in range(steps):
        x = FlatTensors(normal(1024, seed=step), layout)
        (staged,) = simulate([compressor.aggregate(x, state, AggregationContext(step=step))])
        state = staged.next_state.after(state)
    return float(state["residual"].flat.norm()) / 32


def test_feedback_settles_below_a_clip_of_two() -> None:
    """From there on a residual grows on its own rounding, so a recipe does not wrap it."""
    assert residual_growth(Feedback(TernGrad(clip=1.0))) < 1
    assert residual_growth(Feedback(TernGrad(clip=1.9))) < 3
    assert residual_growth(Feedback(TernGrad(clip=2.5))) > 6
    assert [clip for clip in (None, 1.0, 1.9, 2.0, 2.5) if TernGrad(clip=clip).wants_feedback] == [1.0, 1.9]
    assert not TernGrad(clip=1.0, feedback=False).wants_feedback


def test_in_a_route_its_messages_travel_with_the_others() -> None:
    layout = Layout.of({"a": (16, 33), "b": (20,)})
    script = Route(TernGrad()).aggregate(FlatTensors(torch.ones(layout.numel), layout), State(), AggregationContext())
    first = next(script)
    second = script.send(answer_all([first])[0])
    with pytest.raises(StopIteration):
        script.send(answer_all([second])[0])
    assert [type(first), type(second)] == [Coalesced, AllGather]


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan])
def test_clips_are_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=r"Write TernGrad\(clip=2.5\)"):
        TernGrad(clip=clip)


def test_per_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Write TernGrad\(per_byte=5\)"):
        TernGrad(per_byte=6)
