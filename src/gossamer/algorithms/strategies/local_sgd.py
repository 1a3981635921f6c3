"""LocalSGD and PostLocalSGD: local training with periodic parameter averaging."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.strategies.base import (
    AGREED,
    AveragingStage,
    AveragingStrategy,
    GradientStage,
    Memory,
    Stage,
    Strategy,
)
from gossamer.algorithms.strategies.moment_rounds import KEEP, OWN, MomentRounds, check_moments, moment_rounds
from gossamer.algorithms.strategies.schedule import PeriodicSchedule
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class LocalSGD(AveragingStrategy):
    """Let every worker make `period` steps of its own, then average the parameters.

    x_i <- agreed - mean over workers of (agreed - x_i);  agreed <- x_i
    law:    period 1 with a linear optimizer (SGD, momentum, Nesterov) is synchronous training; with Adam it is not
    bytes:  the compressor's, once per period; a moment that is averaged, dense, once per its own; memory: 2 N
    source: Stich 2018, arXiv:1805.09767; Lin et al. 2020, ICLR (hierarchical: `per_site`); Iacob et al. 2026, ICLR,
            arXiv:2505.22549 (DES-LOC: periods of moments, 3 and 6 times the parameters' in the paper's experiments);
            Chen et al. 2020, FODS, arXiv:2109.05109 (Local AMSGrad: second_moment="amsgrad")

    DES-LOC's periods are independent. Here a moment's period must be a multiple of `period`, so that a moment is
    averaged only in a round that averages its parameters as well.

    A moment changes the more slowly the closer its beta is to one, so it may be averaged less often. What has a period
    of its own here is SGD's or Muon's momentum and Adam's two moments; other optimizers are refused.

    optimizer_state: the first moment after a round. "keep": each worker's own, of its own gradients only. "average":
    that of all workers, and the second one as well, dense. "align": m_i + (mean_j s_j - s_i), where s is the mean step
    since the last round in the unit of m, (agreed - x) / (lr period) times what Adam divides by. It sends no bytes,
    since each worker knows its own s and hears the mean. It follows FedCM (Xu et al. 2021,
    arXiv:2106.10874) and FedAdamW (Liu et al. 2025, arXiv:2510.27486), which add the mean step to every local step and
    begin with m = 0; here the correction fades with the moment. Adam, AdamW, and SGD with momentum.

    second_moment: v that Adam and AdamW divide by in local steps. "agreed": the mean of the workers' v in the last
    round, bias corrected there, the same on all workers until the next. "amsgrad": the largest of these means so far,
    entry by entry (Local AMSGrad). Each worker's own v moves on meanwhile, and is used until the first round; the paper
    begins with a constant instead. A mean of v is not the v of mean gradients: it is larger by the gradients' variance
    over the workers. v travels dense, in every round or once per second_moment_period.
    """

    period: int  # steps of the optimizer
    per_site: int | None = None  # neighboring workers that average gradients in every step; None: hierarchy off
    optimizer_state: str = KEEP  # momenta at a merge: "keep", "align", "average" (dense) or "reset" them
    first_moment_period: int | None = None  # steps between two means of it, a multiple of period; None: as above
    second_moment_period: int | None = None  # likewise
    second_moment: str = OWN  # that Adam's local steps divide by: each worker's "own", the "agreed" one, or "amsgrad"

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period is a number of steps, 1 or more, not {self.period}")
        require(
            self.per_site is None or self.per_site >= 2,
            f"per_site is how many neighbours average gradients in every step, at least 2, not {self.per_site}",
        )
        check_moments(*self._moment_settings)

    @property
    def _moment_settings(self) -> tuple[int, str, int | None, int | None, str]:
        periods = self.first_moment_period, self.second_moment_period
        return self.period, self.optimizer_state, *periods, self.second_moment

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (AveragingStage(0, self, self.per_site),)

    @property
    def on_merge(self) -> str:
        return self.optimizer_state

    @property
    def moments(self) -> MomentRounds:
        return moment_rounds(*self._moment_settings)

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

    The first merge is after step start + period. torch's PeriodicModelAverager(period, warmup_steps=start) averages
    after step start + 1 first, and then every `period` steps: period - 1 steps earlier each time.

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
