"""A factor for steps, not for schedules."""

from __future__ import annotations

import torch
from torch.optim import SGD, Optimizer

from gossamer.plan.simulate.learning_rate import LearningRateFactor


class Wrapping(Optimizer):
    """Steps through another, whose groups it shows as its own, as SAM and Lookahead do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([group["params"][0] for group in inner.param_groups], {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        self.inner.step()


def moved(optimizer: Optimizer, parameter: torch.Tensor) -> float:
    parameter.data.zero_()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return -parameter.item()


def test_steps_are_multiplied_and_rates_stay() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    plain = SGD([parameter], lr=0.5)
    wrapping = Wrapping(SGD([parameter], lr=0.5))
    here = True
    factor = LearningRateFactor(4.0, lambda: here)
    assert (moved(plain, parameter), moved(wrapping, parameter)) == (2.0, 2.0)
    assert (plain.param_groups[0]["lr"], wrapping.param_groups[0]["lr"]) == (0.5, 0.5)
    here = False
    assert moved(plain, parameter) == 0.5
    here = True
    factor.remove()
    assert moved(plain, parameter) == 0.5
