"""Delayed Nesterov: an outer optimizer for merges of a part of the workers, with one step of the momentum per round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

FULL_ROUND = 1 - 1e-6  # shares that add up to it are a round; less than 1, since 3 * (1 / 3) may be rounded
SUM, SHARES, MOMENTUM = "sum", "shares", "momentum_buffer"


class DelayedNesterov(Optimizer):
    """Adds each merge at once, and to Nesterov momentum once per round.

    D <- D + share d;  m <- momentum m + D, D <- 0 once the shares since the last time add up to 1, and m' = m in that
    step, otherwise m' = 0;  x <- x - lr (share d + momentum m')
    law:    share 1 is torch.optim.SGD(lr, momentum, nesterov=True), bit for bit; share 1/n is delayed Nesterov with
            buffers of n and c = 0; every share d enters the momentum exactly once
    memory: m, and D if shares are below 1
    source: Liu et al. 2024, arXiv:2401.09135, Algorithm 3

    Gradients are pseudo-gradients: differences of parameters. Momentum in every step would multiply the move of n
    merges of about equal differences, which no learning rate corrects.

    The shares of a round may add up to more than 1, for example with merges of 2 of 3 workers. The remainder counts for
    the next round, so that a round is 1 on average.

    Args:
        params: as in torch.optim.
        lr: outer learning rate.
        momentum: decay of the momentum, in [0, 1).
        share: weight of the next gradients: the part of the workers that they are the mean of.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, share: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": share})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make a step with the parameters that have a gradient. Gradients are not modified."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["momentum"], group["share"])

    def _step(self, parameter: Parameter, gradient: Tensor, lr: float, momentum: float, share: float) -> None:
        move = gradient if share == 1 else gradient * share
        if momentum and (velocity := self._velocity(parameter, move, momentum, share)) is not None:
            move = move.add(velocity, alpha=momentum)
        parameter.sub_(move, alpha=lr)

    def _velocity(self, parameter: Parameter, move: Tensor, momentum: float, share: float) -> Tensor | None:
        """Add `move` to the momentum. Returns it at the end of a round."""
        state = self.state[parameter]
        if not state:
            state[MOMENTUM], state[SUM], state[SHARES] = torch.zeros_like(move), None, 0.0
        state[SHARES] += share
        if state[SHARES] < FULL_ROUND:
            state[SUM] = move.clone() if state[SUM] is None else state[SUM].add_(move)
            return None
        state[SHARES] = max(state[SHARES] - 1, 0.0)
        velocity: Tensor = state[MOMENTUM]
        velocity.mul_(momentum).add_(move if state[SUM] is None else state[SUM].add_(move))
        state[SUM] = None
        return velocity
