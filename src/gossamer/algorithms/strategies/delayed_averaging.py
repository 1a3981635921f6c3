"""DelayedAveraging: parameter averaging that overlaps with local steps; a late mean replaces the worker's own steps."""

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
    """Apply local steps immediately; `delay` steps later, replace those that were sent by their mean over the workers.

    offered: u_i = minus the change by this worker's optimizer in the last `period` steps
    landing: x_i <- x_i + own(u_i) - mean over workers of u_j;  agreed <- agreed - mean
    law:    x_i = agreed - sum of own parts in flight - residual; with SGD and one learning rate
            x_i = x_0 - lr (sum of mean gradients that landed + sum of own gradients in flight)
    bytes:  the compressor's, once per period; memory: 3 N, and 2 N for each round in flight
    source: Zhu et al. 2021, NeurIPS (Delayed Gradient Averaging)

    The paper calls the delay D and the period K. It subtracts gradients times the learning rate of the step that used
    them. Here workers send the changes of the parameters: the same for SGD, also if its learning rate changes in the
    meantime, and correct for momentum and Adam, with steps that cannot be reverted by their gradients. The steps of all
    workers have equal weights, regardless of session.set_batch_weight: the replaced part must be the part that was
    sent.

    With a compressor, workers keep omitted entries in their own parameters, and `agreed` lags behind by all of them:
    after 80 steps of a small language model with TopK(0.001), the loss of `agreed` was 4.26 and that of the workers'
    mean 2.57, as without a compressor. So session.averaged_parameters returns the mean of the workers' parameters,
    exact and uncompressed, and every rank must call it.

    Args:
        delay: optimizer steps between sending a change and applying its mean.
        period: optimizer steps per round.

    Example:
        >>> gossamer.DelayedAveraging(delay=4, period=2)
        DelayedAveraging(delay=4, period=2)
    """

    delay: int
    period: int = 1

    def __post_init__(self) -> None:
        require(self.delay >= 0, f"delay must be a number of steps, 0 or more, got {self.delay}")
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")

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
        memory[FROM].sub_(parameters)  # rounding errors are offered next time

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        assert own is not None
        memory[AGREED].sub_(mean)
        change = own.sub_(mean)
        memory[FROM].add_(change)
        parameters.add_(change)

    def undo(self, memory: Memory, offered: Tensor) -> None:
        memory[FROM].add_(offered)
