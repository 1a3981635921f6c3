"""DiLoCo with compressors that leave most of a difference for later: which outer momentum is cautioned against."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from support.virtual_workers import Worker, cluster, seeded
from torch import nn
from torch.nn.functional import mse_loss

from gossamer.algorithms.recipes.recipe import resolve

STEPS, WORLD = 240, 2
FEW = ["TopK(0.01)", "TopK(0.05)", "RandomK(0.1)", "PowerSGD(rank=1)", "Chain(TopK(0.05), SignMagnitude())"]
MOST = ["Dense()", "TopK(0.1)", "OneBit()", "Int8()", "Float4()", "TernGrad()", "TopK(0.01, feedback=False)"]


def student(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).double()


@lru_cache
def loss(compressor: str, momentum: float) -> float:
    """What a student has learnt of a teacher after STEPS, 8 to a round."""

    def work(worker: Worker) -> float:
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            y = 3 * student(5)(x)
        model = student(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, f"DiLoCo(8, outer_momentum={momentum}) + {compressor}")
        picks = torch.Generator().manual_seed(worker.rank)
        for _ in range(STEPS):
            pick = torch.randint(0, 256, (16,), generator=picks)
            optimizer.zero_grad()
            mse_loss(model(x[pick]), y[pick]).backward()
            optimizer.step()
        with torch.no_grad():
            return float(mse_loss(model(x), y))

    return cluster(work, WORLD)[0]


def caution(text: str, world: int | None = None) -> str | None:
    recipe = resolve(text, world)
    return recipe.strategy.caution(recipe.compressor)


@pytest.mark.parametrize("compressor", FEW)
def test_outer_momentum_and_little_of_a_difference_are_told(compressor: str) -> None:
    for world in (None, 2, 64):
        told = caution(f"DiLoCo(8) + {compressor}", world)
        assert told is not None
        assert "write DiLoCo(period=8, outer_learning_rate=1.0, outer_momentum=0.0), without" in told
        for momentum in (0.0, 0.5):
            assert caution(f"DiLoCo(8, outer_momentum={momentum}) + {compressor}", world) is None


@pytest.mark.parametrize("compressor", MOST)
def test_what_leaves_little_behind_or_nothing_waiting_is_not(compressor: str) -> None:
    for world in (None, 2, 64):
        assert caution(f"DiLoCo(8) + {compressor}", world) is None
    assert caution("LocalSGD(8) + TopK(0.01)", 4) is None


@pytest.mark.parametrize("compressor", ["RandomK(0.1)", "PowerSGD(rank=1)"])
def test_what_is_told_does_worse_than_without_momentum(compressor: str) -> None:
    """And what is written instead does not."""
    without, calm, momentous = (loss(compressor, momentum) for momentum in (0.0, 0.5, 0.9))
    assert momentous > 1.15 * without
    assert calm < 1.15 * without


@pytest.mark.parametrize("compressor", ["Dense()", "OneBit()"])
def test_what_is_not_gains_by_momentum(compressor: str) -> None:
    assert loss(compressor, 0.9) < loss(compressor, 0.0)
