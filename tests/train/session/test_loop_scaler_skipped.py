"""Scaler hook: hears of exactly the attached optimizer's steps that a GradScaler leaves out, until it is removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.train.session.loop_scaler import SkippedStepHook


class Loop:
    """Two optimizers that share a scaler, as a GAN's do; the first is attached."""

    def __init__(self) -> None:
        self.models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.skipped = 0
        self.hook = SkippedStepHook(self.scaler, self.optimizers[0], self.count)

    def count(self) -> None:
        self.skipped += 1

    def train(self, which: int, factor: float) -> Any:
        self.optimizers[which].zero_grad()
        self.scaler.scale(self.models[which](torch.ones(3, 2)).mean() * factor).backward()
        return self.scaler.step(self.optimizers[which])


@pytest.mark.parametrize(("which", "factor", "skipped"), [(0, 1.0, 0), (0, torch.inf, 1), (1, torch.inf, 0)])
def test_steps_of_the_attached_optimizer_that_are_left_out_are_heard(which: int, factor: float, skipped: int) -> None:
    """Also where the scale grows after a step that was made, which says nothing."""
    loop = Loop()
    for _ in range(3):
        loop.train(1 - which, 1.0)
        loop.train(which, factor)
        loop.scaler.update()
    assert loop.skipped == 3 * skipped


def test_nothing_stays_once_it_is_removed() -> None:
    loop = Loop()
    loop.hook.remove()
    assert loop.scaler.step.__func__ is torch.amp.GradScaler.step  # type: ignore[attr-defined]
    loop.train(0, torch.inf)
    assert loop.skipped == 0


def test_another_wrapper_is_left_where_it_is() -> None:
    loop = Loop()
    inner = loop.scaler.step
    loop.scaler.step = lambda optimizer: inner(optimizer)  # type: ignore[method-assign,assignment]
    theirs = loop.scaler.step
    loop.hook.remove()
    assert loop.scaler.step is theirs
    loop.train(0, 1.0)
    assert loop.skipped == 0


def test_it_does_not_keep_a_session() -> None:
    loop = Loop()
    scaler, optimizer, model = loop.scaler, loop.optimizers[0], loop.models[0]
    del loop
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 2)).mean() * torch.inf).backward()
    scaler.step(optimizer)
