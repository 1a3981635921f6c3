"""EveryStep: synchronous data parallelism, with gradient accumulation or delayed gradients."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.errors import require
from gossamer.strategies.base import GradientStage, Stage, Strategy


@dataclass(frozen=True, repr=False)
class EveryStep(Strategy):
    """Average gradients in every backward pass; when backward() returns they are averaged.

    g = mean over workers of g_i
    source: Goyal et al. 2017, arXiv:1706.02677 (large minibatches); Li et al. 2020, VLDB (overlap)

    With accumulate > 1, the passes before the last leave no gradient, so an optimizer that steps for every batch does
    nothing then (a GradScaler wants gradients whenever it steps: let it step after the last pass only).
    With accumulate > 1 or a delay, every pass counts: write `with session.no_sync():` around one whose gradients are to
    be thrown away, as those of a GAN's generator for its discriminator.
    """

    accumulate: int = 1  # backward passes per step, which uses the mean over all their samples
    delay: int = 0  # steps between computing a gradient and using its mean; the first steps have none

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, f"accumulate is a number of backward passes, 1 or more, not {self.accumulate}")
        require(self.delay >= 0, f"delay is a number of steps, 0 or more, not {self.delay}")
        require(
            self.delay == 0 or self.accumulate == 1,
            "EveryStep hides the wait for gradients either behind the passes that accumulate or behind a delayed step: "
            f"write EveryStep(accumulate={self.accumulate}) or EveryStep(delay={self.delay})",
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (GradientStage(0, self.accumulate, self.delay),)
