"""TwoBit: a fixed threshold and its speed limit; an adaptive one that follows what it sees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, TwoBit
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite

ADAPTIVE = TwoBit(adaptive=True)


def one(x: Tensor) -> FlatTensors:
    return FlatTensors(x, Layout.of({"x": (len(x),)}))


def sent(codec: TwoBit, x: Tensor) -> Tensor:
    return codec.decoded(codec.encode(one(x), AggregationContext()), one(x).layout, x)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def after(compressor: Compressor, gradients: list[Tensor]) -> State:
    state = compressor.init(one(torch.zeros_like(gradients[0])), AggregationContext())
    for step, gradient in enumerate(gradients):
        (staged,) = simulate([compressor.aggregate(one(gradient), state, AggregationContext(step=step))])
        state = staged.next_state.after(state)
    return state


def test_codes_by_hand() -> None:
    x = torch.tensor([0.5, -0.5, 0.4999, -0.4999, 7.0, 0.0, -0.0])
    (codes,) = TwoBit().encode(one(x), AggregationContext())
    assert codes.tolist() == [0b00001011, 0b000011]
    assert sent(TwoBit(), x).tolist() == [0.5, -0.5, 0, 0, 0.5, 0, 0]


@pytest.mark.parametrize("threshold", [0.5, 0.1, 3e-8])
def test_what_reaches_the_threshold_is_sent(threshold: float) -> None:
    """Exactly: nothing of it is left, and of the next smaller number everything is."""
    reach = torch.tensor(threshold)
    below = torch.nextafter(reach, torch.tensor(0.0))
    x = torch.stack([reach, -reach, below, -below])
    left = after(Feedback(TwoBit(threshold=threshold)), [x])["residual"].flat
    assert torch.equal(left, torch.stack([reach - reach, reach - reach, below, -below]))


@pytest.mark.parametrize("steps", [1, 10, 64])
def test_a_fixed_threshold_is_a_speed_limit(steps: int) -> None:
    left = after(Feedback(TwoBit(threshold=0.5)), [torch.tensor([1.0, -1.0])] * steps)["residual"].flat
    assert left.tolist() == [0.5 * steps, -0.5 * steps]


def test_nothing_but_codes_travels_where_everyone_knows_the_threshold() -> None:
    assert [t.dtype for t in TwoBit().encode(one(normal(10)), AggregationContext())] == [torch.uint8]
    assert [t.dtype for t in ADAPTIVE.encode(one(normal(10)), AggregationContext())] == [torch.float32, torch.uint8]


# -- the adaptive threshold


def threshold_of(x: Tensor, codec: TwoBit = ADAPTIVE) -> float:
    return float(codec.encode(one(x), AggregationContext())[0])


def test_the_unit_is_the_magnitude_of_what_is_there() -> None:
    large = TwoBit(adaptive=True, block=16384)
    x = torch.zeros(10_000)
    x[[3, 777, 9_000]] = torch.tensor([0.25, -0.25, 0.25])
    assert threshold_of(x, large) == 0.125
    assert threshold_of(normal(16_384), large) == pytest.approx(0.5 * math.sqrt(math.pi / 2), rel=0.02)


def test_every_tensor_has_its_own() -> None:
    x = FlatTensors.pack(
        {"a": torch.ones(3), "none": torch.empty(0), "zeros": torch.zeros(5), "b": torch.full((9,), 4.0)}
    )
    assert ADAPTIVE.encode(x, AggregationContext())[0].tolist() == [0.5, 0.0, 2.0]


def test_every_block_has_its_own() -> None:
    x = torch.cat([torch.ones(16), torch.full((16,), 8.0), torch.full((5,), 2.0)])
    assert TwoBit(adaptive=True, block=16).encode(one(x), AggregationContext())[0].tolist() == [0.5, 4.0, 1.0]
    assert len(ADAPTIVE.encode(one(torch.ones(5000)), AggregationContext())[0]) == 3


def test_the_residual_is_part_of_what_is_measured() -> None:
    x, owed = normal(500), 30 * normal(500, seed=1)
    payload = ADAPTIVE.encode(one(x), AggregationContext(), Residual(owed, torch.empty(500)))
    assert float(payload[0]) == pytest.approx(threshold_of(x + owed), rel=1e-6)


@pytest.mark.parametrize("power", [-100, -20, 10, 100])
def test_scale_changes_nothing_but_the_threshold(power: int) -> None:
    x = normal(1000)
    thresholds, codes = ADAPTIVE.encode(one(x), AggregationContext())
    scaled, same = ADAPTIVE.encode(one(x * 2.0**power), AggregationContext())
    assert torch.equal(codes, same)
    assert torch.equal(scaled, thresholds * 2.0**power)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60).filter(any),
    st.floats(0.05, 0.95),
    st.sampled_from([8, 2048]),
)
def test_law(numbers: list[float], threshold: float, block: int) -> None:
    """Something is always sent, and the error is smaller than the input by what the law says."""
    codec = TwoBit(threshold=threshold, adaptive=True, block=block)
    x = torch.tensor(numbers).double()
    x = torch.where(x.abs() < 1e-30, 0, x)
    if x.any():
        told = sent(codec, x)
        assert told.any()
        kept = 1 - threshold * (1 - threshold) / math.sqrt(min(block, len(x)))
        for w, part in zip(x.split(block), told.split(block), strict=True):
            assert float((w - part).square().sum()) <= kept * float(w.square().sum()) * (1 + 1e-6)


def test_blocks_serve_a_tensor_of_many_scales_better_than_one_threshold() -> None:
    """Rows of an embedding that differ by orders of magnitude: with one threshold the small ones are never sent."""
    x = torch.cat([scale * normal(2048, seed=k) for k, scale in enumerate((1.0, 1e-2, 1e-4))])
    errors = [
        (w - part).norm() / w.norm() for w, part in zip(x.split(2048), sent(ADAPTIVE, x).split(2048), strict=True)
    ]
    assert max(errors) < 0.7
    together = sent(TwoBit(adaptive=True, block=8192), x)
    assert torch.equal(together[2048:], torch.zeros(4096))


def test_law_catches_a_threshold_of_another_size() -> None:
    for wrong in (TwoBit(threshold=50.0), TwoBit(threshold=1e-6)):
        x = normal(50).double()
        assert float((x - sent(wrong, x)).square().sum()) > (1 - 0.25 / math.sqrt(50)) * float(x.square().sum())


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_any_scale_is_served_from_the_first_step(scale: float) -> None:
    given = [scale * normal(2000, seed=step) for step in range(80)]
    first = sent(ADAPTIVE, given[0])
    assert 0.3 < float(first.norm() / given[0].norm()) < 1.2
    left = [after(Feedback(ADAPTIVE), given[:steps])["residual"].flat.norm() / given[0].norm() for steps in (40, 80)]
    assert left[1] < 1.1 * left[0] < 1.2
    fixed = after(Feedback(TwoBit()), given)["residual"].flat.norm() / given[0].norm()
    assert scale == 1.0 or fixed > 5, "a fixed threshold would have done"


def test_a_jump_in_scale_is_followed_at_once() -> None:
    given = [scale * normal(2000, seed=step) for step, scale in enumerate([1.0] * 20 + [1e4] + [1.0] * 100)]
    left = [after(Feedback(ADAPTIVE), given[:steps])["residual"].flat.norm() for steps in (20, 21, 61, 121)]
    assert left[1] < 1e4 * left[0]
    assert left[2] < 0.02 * left[1]
    assert left[3] < 0.2 * left[2]


def test_a_lasting_gradient_is_owed_no_more_than_a_few_steps() -> None:
    """Where a fixed threshold's debt grows by the step."""
    lean = normal(2000, seed=99)
    left = [after(Feedback(ADAPTIVE), [lean] * steps)["residual"].flat.norm() / lean.norm() for steps in (50, 100)]
    assert left[1] < 1.2 * left[0]
    fixed = [after(Feedback(TwoBit()), [lean] * steps)["residual"].flat.norm() / lean.norm() for steps in (50, 100)]
    assert fixed[1] > 1.8 * fixed[0] > 10


def descended(compressor: Compressor, scale: float) -> float:
    """How far from a minimum that lies `scale` away a descent ends, relative to that."""
    target = scale * normal(64)
    x = torch.zeros(64)
    state = compressor.init(one(x), AggregationContext())
    for step in range(300):
        (staged,) = simulate([compressor.aggregate(one(x - target), state, AggregationContext(step=step))])
        state = staged.next_state.after(state)
        x = x - 0.1 * staged.mean
    return float((x - target).norm() / target.norm())


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_converges_where_a_fixed_threshold_does_not(scale: float) -> None:
    assert descended(Feedback(ADAPTIVE), scale) < 1e-3
    assert descended(Feedback(TwoBit()), scale) > 0.5


@pytest.mark.parametrize("x", [[math.nan], [math.inf], [3e38, 1e300], [1e200]], ids=str)
def test_what_cannot_be_sent(x: list[float]) -> None:
    with pytest.raises(NotFinite):
        ADAPTIVE.encode(one(torch.tensor(x, dtype=torch.float64)), AggregationContext())


def test_sums_that_could_overflow_are_noticed() -> None:
    (staged,) = simulate([ADAPTIVE.aggregate(one(torch.full((8,), 3e38)), State(), AggregationContext())])
    assert not staged.finite


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1e-60, math.inf, math.nan])
def test_thresholds_are_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"Write TwoBit\(threshold=0.5\)"):
        TwoBit(threshold=threshold)


def test_adaptive_thresholds_are_fractions() -> None:
    with pytest.raises(ValueError, match=r"Write TwoBit\(threshold=0.5, adaptive=True\)"):
        TwoBit(threshold=1.0, adaptive=True)


@pytest.mark.parametrize("block", [0, 4, 100, 2**15])
def test_blocks_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"Write TwoBit\(threshold=0.5, adaptive=True, block=2048\)"):
        TwoBit(adaptive=True, block=block)


def test_who_wants_feedback() -> None:
    assert TwoBit().wants_feedback
    assert not TwoBit(feedback=False).wants_feedback
