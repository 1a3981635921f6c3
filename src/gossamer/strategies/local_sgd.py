"""LocalSGD and PostLocalSGD: local training with periodic parameter averaging."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.errors import require
from gossamer.strategies.base import (
    AGREED,
    AVERAGE,
    KEEP,
    RESET,
    AveragingStage,
    AveragingStrategy,
    GradientStage,
    Memory,
    Stage,
    Strategy,
)
from gossamer.strategies.schedule import PeriodicSchedule

OPTIMIZER_STATES = (KEEP, AVERAGE, RESET)


@dataclass(frozen=True, repr=False)
class LocalSGD(AveragingStrategy):
    """Let every worker make `period` steps of its own, then average the parameters.

    x_i <- agreed - mean over workers of (agreed - x_i);  agreed <- x_i
    law:    period 1 with a linear optimizer (SGD, momentum, Nesterov) is synchronous training; with Adam it is not
    bytes:  the compressor's, once per period; memory: 2 N
    source: Stich 2018, arXiv:1805.09767; Lin et al. 2020, ICLR (hierarchical: `per_site`)

    """

    period: int  # steps of the optimizer
    per_site: int | None = None  # neighboring workers that average gradients in every step; None: hierarchy off
    optimizer_state: str = KEEP  # momenta at a merge: "keep" each worker's own, "average" them (dense), or "reset" them

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period is a number of steps, 1 or more, not {self.period}")
        require(
            self.per_site is None or self.per_site >= 2,
            f"per_site is how many neighbours average gradients in every step, at least 2, not {self.per_site}",
        )
        check_optimizer_state(self.optimizer_state)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (AveragingStage(0, self, self.per_site),)

    @property
    def on_merge(self) -> str:
        return self.optimizer_state

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.period)

    def begin(self, parameters: Tensor) -> Memory:
        return {AGREED: parameters.clone()}

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        parameters.copy_(memory[AGREED].sub_(mean))


@dataclass(frozen=True, repr=False)
class PostLocalSGD(Strategy):
    """Average gradients in every step until `start` steps were made; from then on, LocalSGD(period).

    law:    all workers hold the same parameters until `start`, and after each merge
    source: Lin et al. 2020, ICLR

    A compressor's residual of gradients is dropped at `start`: differences of parameters have another unit.
    """

    period: int
    start: int
    optimizer_state: str = KEEP

    def __post_init__(self) -> None:
        require(self.start >= 1, f"start is a number of steps, 1 or more, not {self.start}")
        self.local  # noqa: B018 - its arguments are checked where it is made

    @property
    def local(self) -> LocalSGD:
        """The strategy from `start` on."""
        return LocalSGD(self.period, optimizer_state=self.optimizer_state)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return GradientStage(0), AveragingStage(self.start, self.local)


def check_optimizer_state(value: str) -> None:
    require(
        value in OPTIMIZER_STATES,
        f'optimizer_state is what becomes of momenta at a merge: "keep", "average" or "reset", not {value!r}',
    )
