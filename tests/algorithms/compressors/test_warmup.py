"""Warm-up: dense in the first steps, compressed after."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws.laws import LAYOUT, Group
from support.aggregations import priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, PowerSGD, Route, TopK, Warmup
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.warmup import ramp
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate

SMALL = Layout.of({"a": (3, 4), "b": (5,)})


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(SMALL.numel, generator=rng.generator("warmup", seed))


def bytes_at(compressor: Compressor, step: int) -> float:
    return priced_bytes(compressor, 4, LAYOUT, step)


@pytest.mark.parametrize("wrap", [Warmup, lambda inner, steps: Feedback(Warmup(inner, steps))])
def test_the_price_changes_after_the_last_warm_step(wrap: type[Warmup]) -> None:
    inner = TopK(density=0.1)
    dense, sparse = bytes_at(Dense(), 0), bytes_at(inner, 0)
    assert [bytes_at(wrap(inner, steps=3), step) for step in range(6)] == [dense] * 3 + [sparse] * 3


def test_nothing_is_owed_while_everything_travels() -> None:
    warm = Group(Feedback(Warmup(TopK(density=0.1), steps=3)), 3, dtype=torch.float32)
    dense = Group(Dense(), 3, dtype=torch.float32)
    for _ in range(3):
        gradients = warm.gradients()
        staged = warm.aggregate(gradients)
        assert torch.equal(staged[0].mean, dense.aggregate(gradients)[0].mean)
        for each, state, x in zip(staged, warm.states, gradients, strict=True):
            assert torch.equal(each.own, x)
            assert not state[RESIDUAL].flat.any()
    warm.aggregate(warm.gradients())
    assert all(state[RESIDUAL].flat.any() for state in warm.states)


@pytest.mark.parametrize("inner", [Feedback(TopK(density=0.1)), Feedback(PowerSGD(rank=2))], ids=repr)
def test_afterwards_it_is_the_inner_compressor(inner: Compressor) -> None:
    """The steps before leave no trace: state is as it began."""
    warm, plain = Group(Warmup(inner, steps=2), 3), Group(inner, 3)
    for _ in range(2):
        warm.aggregate(warm.gradients())
    plain.step = 2
    for _ in range(3):
        gradients = warm.gradients()
        for a, b in zip(warm.aggregate(gradients), plain.aggregate(gradients), strict=True):
            assert torch.equal(a.mean, b.mean)
    for a_state, b_state in zip(warm.states, plain.states, strict=True):
        assert a_state.keys() == b_state.keys()
        assert all(torch.equal(a_state[key].flat, b_state[key].flat) for key in a_state)


def test_what_was_owed_before_is_paid_at_once() -> None:
    xs, owed = [numbers(seed) for seed in range(3)], [numbers(seed) for seed in range(3, 6)]
    residuals = [Residual(before, torch.full_like(before, torch.nan)) for before in owed]
    warm = Warmup(TopK(density=0.1), steps=1)
    staged: list[AggregationResult] = simulate(
        [
            warm.aggregate_compensated(FlatTensors(x, SMALL), residual, State(), AggregationContext(rank=rank, world=3))
            for rank, (x, residual) in enumerate(zip(xs, residuals, strict=True))
        ]
    )
    torch.testing.assert_close(staged[0].mean, (sum(xs) + sum(owed)) / 3)
    for each, x, residual in zip(staged, xs, residuals, strict=True):
        assert torch.equal(each.own, x + residual.before)
        assert not residual.after.any()


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_mean_beyond_half_precision_is_noticed(factor: float) -> None:
    x = torch.full((SMALL.numel,), 30000.0, dtype=torch.float16)
    residual = Residual(torch.full((SMALL.numel,), 30000.0 * factor), torch.empty(SMALL.numel))
    out = torch.empty_like(x)
    at = AggregationContext()
    staged: AggregationResult = simulate(
        [Dense().aggregate_compensated(FlatTensors(x, SMALL), residual, State(), at, out)]
    )[0]
    assert staged.mean is out
    assert staged.finite == bool(torch.isfinite(out).all())
    assert staged.finite == (factor == 1.0)


def test_it_asks_for_what_the_inner_compressor_asks_for() -> None:
    inner = Route(PowerSGD(rank=1), smallest=8)
    warm = Warmup(inner, steps=2)
    assert [warm.group(each) for each in LAYOUT] == [inner.group(each) for each in LAYOUT]
    assert Warmup(PowerSGD(rank=1), steps=2).suits((3, 4))
    assert not Warmup(PowerSGD(rank=2), steps=2).suits((3, 4))
    assert Warmup(TopK(density=0.1), steps=2).wants_feedback
    assert not Warmup(Feedback(TopK(density=0.1)), steps=2).wants_feedback


def test_steps_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"got -1. Write Warmup\("):
        Warmup(TopK(density=0.1), steps=-1)


# -- ramp ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("final_density", "steps", "table"),
    [
        (0.001, 8, [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.00390625] * 2 + [0.001] * 2),
        (0.001, 4, [0.25, 0.0625, 0.015625, 0.00390625, 0.001]),
        (0.01, 6, [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01]),
        (0.0625, 3, [0.25, 0.25, 0.25, 0.0625]),
        (0.001, 2, [0.25, 0.015625, 0.001]),
        (0.001, 0, [0.001, 0.001]),
        (0.25, 3, [0.25, 0.25]),
        (0.5, 3, [0.5, 0.5]),
    ],
)
def test_the_ramp_is_a_table(final_density: float, steps: int, table: list[float]) -> None:
    assert [ramp(step, steps, final_density) for step in range(len(table))] == table


def test_sparsities_are_the_published_ones() -> None:
    sparsities = [round(100 * (1 - ramp(step, 4, 0.001)), 4) for step in range(5)]
    assert sparsities == [75, 93.75, 98.4375, 99.6094, 99.9]


@given(steps=st.integers(0, 500), final_density=st.floats(1e-6, 1.0))
def test_the_ramp_falls_to_its_end(steps: int, final_density: float) -> None:
    densities = [ramp(step, steps, final_density) for step in range(steps + 2)]
    assert densities == sorted(densities, reverse=True)
    assert densities[-2:] == [final_density, final_density] or steps == 0
    assert densities[0] <= max(0.25, final_density)
