"""EveryStep: synchronous data parallelism, with gradient accumulation or delayed gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gossamer.algorithms.strategies.base import GradientStage, Stage, Strategy
from gossamer.algorithms.strategies.global_batch import batches_per_step
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class EveryStep(Strategy):
    """Average gradients in every backward pass; when backward() returns they are averaged.

    g = mean over workers of g_i
    source: Goyal et al. 2017, arXiv:1706.02677 (large minibatches); Li et al. 2020, VLDB (overlap)

    With accumulate > 1, the passes before the last leave no gradient, so an optimizer that steps for every batch does
    nothing then (a GradScaler wants gradients whenever it steps: let it step after the last pass only).
    With accumulate > 1 or a delay, every pass counts: write `with session.no_sync():` around one whose gradients are to
    be thrown away, as those of a GAN's generator for its discriminator.

    With global_batch and batch, a step is the mean over global_batch samples with any number of workers: each makes its
    share of global_batch / batch backward passes (`gossamer.algorithms.strategies.global_batch`), also alone.
    """

    accumulate: int = 1  # backward passes per step, which uses the mean over all their samples
    delay: int = 0  # steps between computing a gradient and using its mean; the first steps have none
    global_batch: int | None = None  # samples of a step, of all workers together
    batch: int | None = None  # samples of one backward pass of one worker, with global_batch

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, f"accumulate is a number of backward passes, 1 or more, not {self.accumulate}")
        require(self.delay >= 0, f"delay is a number of steps, 0 or more, not {self.delay}")
        require(
            self.delay == 0 or self.accumulate == 1,
            "EveryStep hides the wait for gradients either behind the passes that accumulate or behind a delayed step: "
            f"write EveryStep(accumulate={self.accumulate}) or EveryStep(delay={self.delay})",
        )
        require(
            (self.global_batch is None) == (self.batch is None),
            "a global batch is made of whole batches, and one of both numbers is missing. Write "
            "EveryStep(global_batch=256, batch=32): the samples of a step, and those of a backward pass of one worker",
        )
        require(
            self.global_batch is None or (self.accumulate == 1 and self.delay == 0),
            f"global_batch={self.global_batch} says how many passes make a step, which is made when they are, so "
            f"neither accumulate nor delay goes with it. Write EveryStep(global_batch={self.global_batch}, "
            f"batch={self.batch})",
        )
        _ = self._batches

    @property
    def _batches(self) -> int | None:
        """How many passes of all workers together make a step."""
        if self.global_batch is None or self.batch is None:
            return None
        return batches_per_step(self.global_batch, self.batch)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (GradientStage(0, self.accumulate, self.delay, self._batches),)

    def among(self, world: int) -> Self:
        """Of a global batch, the passes of the worker that makes most."""
        if self._batches is None:
            return self
        return replace(self, accumulate=-(-self._batches // world), global_batch=None, batch=None)
