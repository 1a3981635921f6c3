"""Window: Adam of the last few gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam_training import EPS, WORLD, Adam, adam, by_hand, by_torch, close, everywhere, matrices, together
from support.virtual_workers import Worker, agree, batch, cluster, joined, parameters, train_step
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from gossamer.algorithms.compressors import MicroAdam
from gossamer.base.layout import Slot
from gossamer.train.moments import first_moment
from gossamer.train.moments.first_moment import WINDOW, WindowedMoments


def truncated(length: int) -> Any:
    """Modoranu et al. 2024, written plainly."""

    def direction(
        p: Tensor, gradient: Tensor, count: int, memory: dict[str, Any], betas: tuple[float, float]
    ) -> Tensor:
        kept = memory.setdefault("last", [])
        kept.insert(0, gradient.clone())
        del kept[length:]
        first, second = (sum(b**age * g**power for age, g in enumerate(kept)) for power, b in enumerate(betas, 1))
        m, v = (z * (1 - b) / (1 - b**count) for z, b in zip((first, second), betas, strict=True))
        found: Tensor = m / (v.sqrt() + EPS)
        return found

    return direction


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
@pytest.mark.parametrize("length", [1, 3])
def test_sending_all_is_adam_of_the_last_gradients(length: int, kind: type[Adam], cycle: bool) -> None:
    term = f"MicroAdam(inner=Dense(), window={length})"
    close(together(term, kind, cycle=cycle), by_hand(truncated(length), kind, cycle=cycle))


def test_a_window_as_long_as_the_training_is_adam() -> None:
    close(together("MicroAdam(inner=Dense())"), by_torch())


def test_means_are_clipped_as_they_would_be_without_it() -> None:
    """They have no momentum in them when they arrive."""

    def work(worker: Worker, clip_norm: float | None) -> Tensor:
        model = matrices(worker.rank)
        optimizer = adam(model)
        worker.attach(model, optimizer, everywhere("MicroAdam(inner=Dense())"), clip_norm=clip_norm)
        for step in range(10):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    model = matrices(0)
    optimizer = adam(model)
    for step in range(10):
        optimizer.zero_grad()
        inputs, targets = joined(batch(step, rank) for rank in range(WORLD))
        mse_loss(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    close(agree(cluster(lambda worker: work(worker, 0.1), WORLD)), parameters(model))
    with pytest.raises(AssertionError):
        close(agree(cluster(lambda worker: work(worker, None), WORLD)), parameters(model))


@pytest.mark.parametrize("wrong", [2, 4, 10])
def test_another_length_would_be_found(wrong: int) -> None:
    with pytest.raises(AssertionError):
        close(together("MicroAdam(inner=Dense(), window=3)"), by_hand(truncated(wrong)))


def test_a_window_that_is_read_backwards_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_moment, "reversed", lambda ages: ages, raising=False)
    with pytest.raises(AssertionError):
        close(together("MicroAdam(inner=Dense(), window=3)"), by_hand(truncated(3)))


def test_three_steps_by_hand() -> None:
    """Betas of 0.5 and a window of two: after gradients 4, 2, 2 m is 1 + 0.5 and v is 2 + 1; 4 is forgotten."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Adam([p], lr=1.0, betas=(0.5, 0.5), eps=0.0)
    rule = WindowedMoments(
        optimizer, {"p": p}, MicroAdam(window=2).owns_momentum(Slot("p", (1,), 0, (1,))), warns=False
    )
    for steps, gradient in enumerate([4.0, 2.0, 2.0], 1):
        before = p.detach().clone()
        p.grad = torch.full_like(p, gradient)
        rule.before(steps)
        optimizer.step()
        rule.after()
    state = optimizer.state[p]
    assert (float(state["exp_avg"]), float(state["exp_avg_sq"])) == (1.5, 3.0)
    assert state[WINDOW].shape == (2, 1)
    close(before - p.detach(), torch.tensor([(1.5 / 0.875) / (3 / 0.875) ** 0.5], dtype=torch.float64))
