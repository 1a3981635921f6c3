"""Float4 and SignMagnitude: errors after another rule, with feedback, and for differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.laws import LAYOUT, check_bytes, check_conservation, check_own, check_zeros
from laws.sparse import chained
from torch import Tensor

from gossamer.algorithms.compressors import (
    Chain,
    Codec,
    Compressor,
    Feedback,
    Float4,
    OneBit,
    Sharded,
    SignMagnitude,
    TopK,
)
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.reference.float4 import MAGNITUDES
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate

CHAINED = Chain(TopK(density=0.1), SignMagnitude())


def sent(codec: Codec, x: Tensor) -> Tensor:
    one = FlatTensors(x, Layout.of({"x": (len(x),)}))
    return codec.decoded(codec.encode(one, AggregationContext()), one.layout, x)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=rng.generator("float4", seed), dtype=torch.float64)


# -- Float4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_law_of_four_bits(given_numbers: list[float]) -> None:
    x = torch.tensor(given_numbers).double()
    x = torch.where(x.abs() < 1e-30, 0, x)
    scale, lost = float(x.abs().max()), (x - sent(Float4(), x)).abs()
    assert bool((lost <= x.abs()).all())
    assert bool((lost <= (x.abs() / 3).clamp(min=scale / 128) * (1 + 1e-12)).all())
    assert float(lost.square().sum()) <= float(x.square().sum()) - scale**2 + 1e-9 * scale**2


def test_the_nearest_is_chosen() -> None:
    x = normal(5000)
    for block, told in zip(x.split(256), sent(Float4(), x).split(256), strict=True):
        units = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)]) * block.abs().max()
        nearest = (block[:, None] - units).abs().min(1).values
        torch.testing.assert_close((block - told).abs(), nearest, atol=1e-6, rtol=0)


def test_law_catches_what_is_rounded_toward_zero() -> None:
    """A twin without midpoints loses half of an entry where the law says a third."""
    x = normal(500)
    scale = x.abs().max()
    twin = x.sign() * scale * 2 ** (x.abs() / scale).log2().floor().clamp(min=-6)
    twin = torch.where(x.abs() < scale / 64, 0, twin)
    assert bool(((x - twin).abs() > (x.abs() / 3).clamp(min=scale / 128)).any())


@pytest.mark.parametrize("power", [-120, -20, 20, 100])
def test_scale_changes_nothing_but_scales(power: int) -> None:
    one = FlatTensors(normal(1000).float(), Layout.of({"x": (1000,)}))
    for codec in (Float4(), SignMagnitude()):
        numbers, codes = codec.encode(one, AggregationContext())
        scaled, same = codec.encode(FlatTensors(one.flat * 2.0**power, one.layout), AggregationContext())
        assert torch.equal(codes, same)
        assert torch.equal(scaled, numbers * 2.0**power)


# -- SignMagnitude


@pytest.mark.parametrize(
    "x", [normal(512), normal(512).exp(), torch.eye(1, 512).double()[0]], ids=["bell", "up", "spike"]
)
def test_error_of_two_bits(x: Tensor) -> None:
    """What the law says, and less than what one magnitude leaves."""
    told, magnitude = sent(SignMagnitude(), x), x.abs()
    large = magnitude > magnitude.mean()
    means = [magnitude[side].mean().square() * side.sum() for side in (large, ~large)]
    due = float(x.square().sum() - sum(means))
    assert float((x - told).square().sum()) == pytest.approx(due, rel=1e-5, abs=1e-9)
    assert due < float((x - sent(OneBit(block=512), x)).square().sum()) * (1 - 1e-3)
    assert float(told.abs().sum()) == pytest.approx(float(magnitude.sum()), rel=1e-6)


def test_of_equal_magnitudes_nothing_is_lost() -> None:
    for count in (3, 7, 512, 1000):
        x = torch.where(normal(count) < 0, -1 / 3, 1 / 3).float()
        torch.testing.assert_close(sent(SignMagnitude(), x), x, atol=1e-7, rtol=0)


def test_bits_next_to_one_another() -> None:
    """Two bits of a normal distribution's entries, four, and one: shares of its energy that are lost."""
    x = normal(100_000)
    shares = [float((x - sent(codec, x)).square().mean()) for codec in (OneBit(block=512), SignMagnitude(), Float4())]
    assert shares == [pytest.approx(0.364, abs=0.01), pytest.approx(0.122, abs=0.01), pytest.approx(0.03, abs=0.01)]


# -- after another rule, and with feedback


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("then", [SignMagnitude(), Float4()], ids=repr)
def test_values_that_another_rule_chose(then: Codec, world: int) -> None:
    chain = Chain(TopK(density=0.1), then)
    check_own(chain, world)
    check_conservation(Feedback(chain), world)
    check_zeros(Feedback(chain), world)


def test_bytes_of_a_chain() -> None:
    counts = [max(1, round(0.1 * size)) for size in LAYOUT.sizes]
    two_bits = sum(math.ceil(count / 4) + 8 * math.ceil(count / 512) for count in counts)
    eight_bits = sum(count + 4 * math.ceil(count / 256) for count in counts)
    check_bytes(CHAINED, 3, lambda world: (world - 1) * (chained(0.1) - eight_bits + two_bits))


@pytest.mark.parametrize("codec", [Float4(), SignMagnitude(block=64)], ids=repr)
def test_sharded(codec: Codec) -> None:
    check_own(Sharded(codec), 4)
    check_conservation(Feedback(Sharded(codec)), 3)


def descended(compressor: Compressor, periods: int = 200) -> float:
    """How far from the mean of their minima four workers are on average over the later half, relative to the start.

    In each period everyone descends alone, and the differences of parameters are averaged by `compressor`.
    """
    targets = [normal(256, seed).float() for seed in range(4)]
    goal = torch.stack(targets).mean(0)
    layout, x, found = Layout.of({"x": (256,)}), torch.zeros(256), torch.zeros(256)
    ats = [AggregationContext(rank=rank, world=4) for rank in range(4)]
    states = [compressor.init(FlatTensors(x, layout), at) for at in ats]
    for period in range(periods):
        scripts = [
            compressor.aggregate(FlatTensors(0.3 * (x - target), layout), state, at)
            for target, state, at in zip(targets, states, ats, strict=True)
        ]
        staged = simulate(scripts)
        states = [each.next_state.after(old) for each, old in zip(staged, states, strict=True)]
        x = x - staged[0].mean
        found += x if period >= periods // 2 else 0
    return float((found / (periods // 2) - goal).norm() / goal.norm())


@pytest.mark.parametrize("codec", [Float4(), SignMagnitude(), Chain(TopK(density=0.2), SignMagnitude())], ids=repr)
def test_feedback_makes_few_bits_enough_for_differences(codec: Codec) -> None:
    """Workers whose differences never vanish: what is lost of each must not be lost for good."""
    assert descended(Feedback(codec)) < min(0.05, descended(codec) / 3)


# -- as terms


@pytest.mark.parametrize("block", [0, -2, 1, 7])
def test_blocks_of_four_bits_are_even(block: int) -> None:
    with pytest.raises(ValueError, match=r"Write Float4\(block=256\)"):
        Float4(block=block)


@pytest.mark.parametrize("block", [0, 4, 12, 2**15])
def test_blocks_of_two_bits_are_powers_of_two(block: int) -> None:
    with pytest.raises(ValueError, match=r"Write SignMagnitude\(block=512\)"):
        SignMagnitude(block=block)


def test_in_recipes() -> None:
    assert parse("Float4(128)").terms == (Float4(block=128),)
    assert "Feedback(Sharded(Float4()))" in repr(resolve("Float4", 4))
    assert "Feedback(Chain(TopK(density=0.01), SignMagnitude()))" in repr(
        resolve("Chain(TopK(0.01), SignMagnitude())", 4)
    )
    for silent in (Float4(feedback=False), SignMagnitude(feedback=False)):
        assert not silent.wants_feedback
        assert silent.reencodable
