"""1-bit Adam: what is sent of the momentum once the variance is frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from laws.formulas import ring
from laws.laws import LAYOUT, Group, close
from support.aggregations import priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, OneBit, OneBitAdam, Route, Sharded
from gossamer.algorithms.compressors.dgc import MOMENTUM
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext, AggregationResult


class Accelerated(Group):
    """A group whose optimizer has a first beta."""

    def at(self, rank: int) -> AggregationContext:
        return replace(super().at(rank), momentum=0.8)


@pytest.mark.parametrize(
    "inner", [Dense(), Feedback(OneBit(block=16)), Feedback(Int8()), Feedback(Sharded(Int8(block=16)))], ids=repr
)
def test_own_parts_average_to_the_mean(inner: Compressor) -> None:
    group = Accelerated(OneBitAdam(warmup=2, inner=inner), 3)
    owed = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for _ in range(6):
        staged = group.aggregate(group.gradients())
        now = sum((each.owed for each in staged if each.owed is not None), torch.zeros_like(owed))
        close(torch.stack([each.own for each in staged]).mean(0), staged[0].mean + now - owed, 1e-11)
        assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
        assert all(torch.equal(state[MOMENTUM].flat, group.states[0][MOMENTUM].flat) for state in group.states)
        owed = now


def momenta(inner: Compressor, steps: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """(Adam's moment of what came out, of what was put in, what is owed), all of the mean."""
    group = Accelerated(OneBitAdam(warmup=2, inner=inner), 3)
    came, put = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
    for _ in range(steps):
        gradients = group.gradients()
        put = 0.8 * put + 0.2 * torch.stack(gradients).mean(0)
        staged: list[AggregationResult] = group.aggregate(gradients)
        came = 0.8 * came + 0.2 * staged[0].mean
    owed = torch.stack([state[RESIDUAL].flat for state in group.states if RESIDUAL in state] or [0 * came]).mean(0)
    return came, put, owed


def test_nothing_changes_where_the_inner_compressor_loses_nothing() -> None:
    came, put, _ = momenta(Dense())
    close(came, put, 1e-12)


def test_feedback_keeps_adams_moment_near_what_it_should_be() -> None:
    """m' + mean e' = b1 m + (1 - b1) g + mean e: what rounding took comes back, so the moments stay close."""
    came, put, owed = momenta(Feedback(OneBit(block=64)), 60)
    lost, _, _ = momenta(OneBit(block=64), 60)
    with_feedback, without = (float((each - put).norm() / put.norm()) for each in (came, lost))
    assert float(owed.norm()) > 0
    assert with_feedback < without


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bytes_of_both_phases(world: int) -> None:
    compressor = OneBitAdam(warmup=3, inner=Feedback(OneBit(block=64)))
    for step, expected in [
        (0, ring(world, 4 * LAYOUT.numel)),
        (2, ring(world, 4 * LAYOUT.numel)),
        (3, sum((world - 1) * (-(-size // 8) + 4 * -(-size // 64)) for size in LAYOUT.sizes)),
    ]:
        assert priced_bytes(compressor, world, LAYOUT, step) == expected


def test_a_recipe_feeds_back_and_shards_the_inner_compressor() -> None:
    assert resolve("OneBitAdam(10)").compressor == Route(OneBitAdam(10, inner=Feedback(OneBit())))
    assert resolve("OneBitAdam(10)", 8).compressor == Route(OneBitAdam(10, inner=Feedback(Sharded(OneBit()))))
    assert resolve("OneBitAdam(10, inner=Dense())").compressor == Route(OneBitAdam(10, inner=Dense()))


@pytest.mark.parametrize(
    ("arguments", "wrong"), [({"warmup": 0}, "warmup must be the steps"), ({"clip": -1.0}, r"OneBitAdam\(clip=1.0\)")]
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        OneBitAdam(**arguments)
