"""DelayedAveraging: delayed gradient averaging, hidden behind training; the mean replaces own steps when it lands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.strategies.base import AGREED, FROM, AveragingStrategy, Memory
from gossamer.algorithms.strategies.schedule import PeriodicSchedule
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class DelayedAveraging(AveragingStrategy):
    """Use one's own steps at once; `delay` steps later, replace what was sent of them by everyone's mean.

    offered: u_i = what this worker's optimizer did in the last `period` steps
    landing: x_i <- x_i + own(u_i) - mean over workers of u_j;  agreed <- agreed - mean
    law:    x_i = agreed - sum of own parts in flight - what was never sent; with SGD and one learning rate
            x_i = x_0 - lr (sum of mean gradients that landed + sum of own gradients in flight)
    bytes:  the compressor's, once per period; memory: 3 N, and 2 N for each round in flight
    source: Zhu et al. 2021, NeurIPS (Delayed Gradient Averaging)

    The paper takes gradients back times the learning rate of the step that used them. Here the optimizer's changes of
    the parameters travel, which is the same for SGD, also when its learning rate changes meanwhile, and is right for
    momentum and Adam, whose steps cannot be taken back by their gradients. Steps of all workers count alike, whatever
    session.set_batch_weight says: what is taken back must be what was sent.

    With a compressor workers keep for themselves what it left out, and `agreed` lags behind them by all of that: after
    80 steps of a small language model with TopK(0.001) its loss was 4.26 where the mean of the workers had 2.57, as
    without a compressor. So session.averaged_parameters then gives that mean,
    exact and uncompressed, and every rank must call it.
    """

    delay: int  # steps of the optimizer
    period: int = 1  # steps of the optimizer

    def __post_init__(self) -> None:
        require(self.delay >= 0, f"delay is a number of steps, 0 or more, not {self.delay}")
        require(self.period >= 1, f"period is a number of steps, 1 or more, not {self.period}")

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.period, delay=self.delay)

    @property
    def needs_own(self) -> bool:
        return True

    def merges_own(self, compressor: Compressor) -> bool:
        return not isinstance(compressor, Dense)

    def begin(self, parameters: Tensor) -> Memory:
        return {AGREED: parameters.clone(), FROM: parameters.clone()}

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        torch.sub(memory[FROM], parameters, out=parameters)
        memory[FROM].sub_(parameters)  # rounding's losses are offered next time

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        assert own is not None
        memory[AGREED].sub_(mean)
        change = own.sub_(mean)
        memory[FROM].add_(change)
        parameters.add_(change)

    def undo(self, memory: Memory, offered: Tensor) -> None:
        memory[FROM].add_(offered)
