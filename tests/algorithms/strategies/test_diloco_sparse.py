"""DiLoCo with few entries: SparseLoCo by hand, and which outer momentum is cautioned against."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from support.resumed_training import adamw, check_resume
from support.training_loops import START, close, mean_of, run
from support.virtual_workers import Worker, cluster, network, parameters, seeded, train_step
from torch import Tensor, nn
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
        assert "write DiLoCo(period=8, outer_learning_rate=1.0, outer_momentum=0.0), as in" in told
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


# -- SparseLoCo --------------------------------------------------------------------------------------------------------

CHUNK, KEPT, DECAY, PERIOD = 64, 0.25, 0.95, 3
CODE = f"Feedback(Chain(TopK({KEPT}, chunk={CHUNK}), BinMeans()), decay={DECAY})"
SPARSE = f"DiLoCo({PERIOD}, outer_learning_rate=0.7, outer_momentum=0.0) + Route({CODE}, rest={CODE})"


def told(a: Tensor) -> Tensor:
    """q = Q(TopK(a)) of one tensor: the largest entries of each run, then bins of 1.5 standard deviations."""
    chosen = torch.zeros_like(a, dtype=torch.bool)
    for run_of_a, mark in zip(a.split(CHUNK), chosen.split(CHUNK), strict=True):
        mark[run_of_a.abs().topk(max(1, round(KEPT * len(run_of_a)))).indices] = True
    values = a[chosen]
    width = 1.5 * values.std() if len(values) > 1 else torch.ones(())
    codes = ((values - values.mean()) / width + 2).round().clamp(0, 3)
    for code in codes.unique():
        values[codes == code] = values[codes == code].mean()
    return torch.zeros_like(a).masked_scatter(chosen, values)


def sparseloco_by_hand(steps: int, decay: float = DECAY, world: int = 3) -> list[Tensor]:
    """Equations 1.1 to 1.5 of the paper: what all agree on after each step, of workers with AdamW inside."""
    sizes = [parameter.numel() for parameter in network(0).parameters()]
    models = [network(0) for _ in range(world)]
    inner = [adamw(model) for model in models]
    theta, left = START.clone(), [torch.zeros_like(START) for _ in range(world)]
    path = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            train_step(model, optimizer, step, rank)
        if step % PERIOD == PERIOD - 1:
            wanted = [decay * e + theta - parameters(model) for e, model in zip(left, models, strict=True)]
            sent = [torch.cat([told(part) for part in a.split(sizes)]) for a in wanted]
            left = [a - q for a, q in zip(wanted, sent, strict=True)]
            theta = theta - 0.7 * mean_of(sent)
            for model in models:
                nn.utils.vector_to_parameters(theta.clone(), model.parameters())
        path.append(theta)
    return path


def test_sparseloco_is_its_paper_with_adamw_inside() -> None:
    traces = run(SPARSE, 4 * PERIOD, rule=adamw)
    for trace in traces:
        for ours, theirs in zip(trace.merged, sparseloco_by_hand(4 * PERIOD), strict=True):
            close(ours, theirs, 1e-6)
    with pytest.raises(AssertionError):
        close(traces[0].merged[-1], sparseloco_by_hand(4 * PERIOD, decay=1.0)[-1], 1e-6)


def test_sparseloco_that_sends_everything_is_local_sgd() -> None:
    whole = "DiLoCo(3, outer_learning_rate=1.0, outer_momentum=0.0) + Feedback(TopK(1.0, chunk=64), decay=0.95)"
    for ours, theirs in zip(run(whole, 7, rule=adamw), run("LocalSGD(3)", 7, rule=adamw), strict=True):
        close(ours.path[-1], theirs.path[-1])


def test_sparseloco_resumes_bit_for_bit() -> None:
    check_resume(SPARSE, [4, 6])
    with pytest.raises(AssertionError, match="another way"):
        check_resume(SPARSE, [4], forget_the_residual)


def forget_the_residual(state: Any) -> None:
    for kept in state["state"].values():
        for key, tensor in kept.items():
            if key.endswith("residual"):
                tensor.zero_()
