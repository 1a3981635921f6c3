"""EveryStep: synchronous data parallelism, with gradient accumulation or delayed gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gossamer.algorithms.strategies.base import GradientStage, Stage, Strategy
from gossamer.algorithms.strategies.global_batch import batches_per_step
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class EveryStep(Strategy):
    """Synchronous data parallelism: average the gradients in every backward pass, before backward() returns.

    g = mean over workers of g_i
    source: Goyal et al. 2017, arXiv:1706.02677 (large minibatches); Li et al. 2020, VLDB (overlap)

    With accumulate > 1, backward passes before the last leave no gradient, so optimizer.step() has no effect after
    them. (A GradScaler needs gradients in every step: call it after the last pass only.) With accumulate > 1 or a
    delay, every pass is counted: write `with session.no_sync():` around a pass with gradients that you discard, such as
    the generator's gradients in a GAN's discriminator.

    With global_batch and batch, a step is the mean over global_batch samples for any number of workers: each makes its
    share of global_batch / batch backward passes (`gossamer.algorithms.strategies.global_batch`), also a single worker.

    With balance=True the shares follow the workers' measured compute times, without the time in which they wait for
    others, so that all finish a step at about the same time (`gossamer.algorithms.strategies.shares_by_speed`). A slow
    worker makes at least one pass: if that takes longer than the share of the others, choose a smaller batch or a
    larger global_batch. The mean is still exact over the samples of the step. Without `batch` each worker makes one
    backward pass, of session.batch_size samples. Workers make different numbers of passes, so end the loop by
    `while session.steps < 1000:`, or write `with session.epoch():` around it. Which worker computes which samples then
    depends on measured times, so two runs differ by rounding and by the order of the samples.

    Args:
        accumulate: backward passes per step; the step uses the mean over all their samples.
        delay: steps between computing a gradient and using its mean; the first `delay` steps have no gradient.
        global_batch: samples per step, of all workers together; needs `batch`.
        batch: samples per backward pass of one worker.
        balance: shares of global_batch by speed instead of equal ones.

    Example:
        >>> gossamer.EveryStep(accumulate=4) + gossamer.Int8()
        EveryStep(accumulate=4) + Int8()
    """

    accumulate: int = 1
    delay: int = 0
    global_batch: int | None = None
    batch: int | None = None
    balance: bool = False

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, f"accumulate must be a number of passes, 1 or more, got {self.accumulate}")
        require(self.delay >= 0, f"delay must be a number of steps, 0 or more, got {self.delay}")
        require(
            self.delay == 0 or self.accumulate == 1,
            "accumulate and delay cannot be combined: each overlaps communication with other passes. Write "
            f"EveryStep(accumulate={self.accumulate}) or EveryStep(delay={self.delay}).",
        )
        require(
            not self.balance or self.global_batch is not None,
            "balance=True divides the samples of a step by speed, so their number must be given. Write "
            "EveryStep(global_batch=256, batch=8, balance=True).",
        )
        require(
            (self.global_batch is None) == (self.batch is None) or self.balance,
            "global_batch and batch must be given together. Write EveryStep(global_batch=256, batch=32): the samples "
            "of a step, and those of a backward pass of one worker.",
        )
        require(
            self.global_batch is None or (self.accumulate == 1 and self.delay == 0),
            f"global_batch={self.global_batch} determines the number of passes per step, so it cannot be combined with "
            f"accumulate or delay. Write EveryStep(global_batch={self.global_batch}, "
            f"batch={self.batch}).",
        )
        _ = self._batches

    @property
    def _batches(self) -> int | None:
        """Parts of a step that are dealt out: backward passes, or samples without `batch`."""
        if self.global_batch is None:
            return None
        return batches_per_step(self.global_batch, 1 if self.batch is None else self.batch)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            GradientStage(
                0,
                self.accumulate,
                self.delay,
                batches=self._batches,
                batch=self.batch or 1,
                balance=self.balance,
                in_one_pass=self.global_batch is not None and self.batch is None,
            ),
        )

    def among(self, world: int) -> Self:
        """Return the strategy of the worker that makes the most passes of a global batch."""
        if self._batches is None:
            return self
        passes = 1 if self.batch is None else -(-self._batches // world)
        return replace(self, accumulate=passes, global_batch=None, batch=None, balance=False)
