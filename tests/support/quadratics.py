"""Quadratic devices: each descends a/2 |w - b|^2, whose fixed points under averaging are known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gossamer.federated.client.functions import Round, Update

RATE = 0.125


def quadratic(
    curvatures: Sequence[float],
    minima: Sequence[float],
    *,
    steps: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
) -> Callable[[nn.Module, Round], Update]:
    """By client: descent on its own loss by `steps`, or as many as the recipe says, from `samples`, or one."""

    def train(model: nn.Module, told: Round) -> Update:
        own = told.client
        assert own is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(steps[own] if steps else told.local_steps or 1):
            optimizer.zero_grad()
            loss = sum(curvatures[own] / 2 * (each - minima[own]).square().sum() for each in model.parameters())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
        return Update(samples=samples[own] if samples else 1)

    return train


def fedavg_fixed_point(curvatures: Sequence[float], minima: Sequence[float], steps: int) -> float:
    """Where the mean of devices that make so many steps each stays: w_k = b_k + (1 - rate a_k)^steps (w - b_k)."""
    pulls = [1 - (1 - RATE * a) ** steps for a in curvatures]
    return sum(pull * b for pull, b in zip(pulls, minima, strict=True)) / sum(pulls)


def joined_minimum(curvatures: Sequence[float], minima: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(curvatures, minima, strict=True)) / sum(curvatures)
