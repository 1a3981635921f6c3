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
from gossamer.algorithms.strategies.schedule import PeriodicSchedule, check_fragments
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class LocalSGD(AveragingStrategy):
    """Local SGD: every worker makes `period` optimizer steps, then all average their parameters.

    x_i <- agreed - mean over workers of (agreed - x_i);  agreed <- x_i
    law:    period 1 with a linear optimizer (SGD, momentum, Nesterov) is synchronous training; with Adam it is not
    bytes:  the compressor's, once per period; a moment that is averaged, dense, once per its own; memory: 2 N
    source: Stich 2018, arXiv:1805.09767; Lin et al. 2020, ICLR (hierarchical: `per_site`); Iacob et al. 2026, ICLR,
            arXiv:2505.22549 (DES-LOC: periods of moments, 3 and 6 times the parameters' in the paper's experiments);
            Chen et al. 2020, FODS, arXiv:2109.05109 (Local AMSGrad: second_moment="amsgrad")

    Stich calls the period H.

    Moment periods. A moment changes more slowly the closer its beta is to one, so it may be averaged less often. In
    DES-LOC the periods are independent; here a moment's period must be a multiple of `period`, so a moment is averaged
    only in rounds that average its parameters. Supported are the momentum of SGD and Muon and both moments of Adam;
    other optimizers are rejected.

    optimizer_state selects the first moment after a round. "keep": each worker's own. "average": the mean over all
    workers, and that of the second moment, uncompressed. "align": m_i + (mean_j s_j - s_i), where s is the mean step
    since the last round in the unit of m: (agreed - x) / (lr period) times Adam's denominator. "align" sends no bytes:
    each worker has its own s and receives the mean. It follows FedCM (Xu et al. 2021, arXiv:2106.10874) and FedAdamW
    (Liu et al. 2025, arXiv:2510.27486), which add the mean step to every local step and start with m = 0; here the
    correction decays with the moment. It supports Adam, AdamW, and SGD with momentum.

    second_moment selects the v in the denominator of local steps of Adam and AdamW. "agreed": the mean of the workers'
    v in the last round, with bias correction, equal on all workers until the next round. "amsgrad": the entrywise
    maximum of these means so far (Local AMSGrad). Each worker's own v is still updated, and used until the first round;
    the paper starts with a constant instead. The mean of v is larger than the v of mean gradients, by the variance of
    the gradients over the workers. v is sent uncompressed, in every round or once per second_moment_period.

    With balance=True every worker makes as many local steps per period as its speed allows, in proportion to measured
    compute times: the fastest makes `period`, none less than one. Their mean is weighted by samples. session.steps then
    counts in the common schedule, in which a step of a slow worker counts as several, so end the loop by
    `while session.steps < 1000:`, with a multiple of the period, and derive learning rates from session.steps. See
    the dynamic local updates of Liu et al. 2024, arXiv:2401.09135.

    Args:
        period: optimizer steps per round.
        per_site: number of adjacent workers that average gradients in every step; None: no sites.
        optimizer_state: "keep", "align", "average", or "reset" (zero) the moments at a merge.
        first_moment_period: steps between averages of the first moment, a multiple of period; None: see
            optimizer_state.
        second_moment_period: the same for the second moment.
        second_moment: "own", "agreed" or "amsgrad".
        fragments: number of parts of the parameters, of about equal bytes, that are averaged in turn, each once per
            period (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). The bytes are the same, in messages that
            are smaller and more frequent.
        balance: local steps by speed instead of equally many.

    Example:
        >>> gossamer.LocalSGD(period=8) + gossamer.Float4()
        LocalSGD(period=8) + Float4()
    """

    period: int
    per_site: int | None = None
    optimizer_state: str = KEEP
    first_moment_period: int | None = None
    second_moment_period: int | None = None
    second_moment: str = OWN
    fragments: int = 1
    balance: bool = False

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")
        check_fragments(self.period, self.fragments)
        require(
            self.per_site is None or self.per_site >= 2,
            f"per_site must be a number of workers that average gradients every step, 2 or more, got {self.per_site}",
        )
        require(
            not self.balance or self.per_site is None,
            f"balance=True gives every worker its own number of local steps, and the workers of a site average their "
            f"gradients in every step. Write LocalSGD(period={self.period}, balance=True) without per_site.",
        )
        check_moments(self)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (AveragingStage(0, self, self.per_site),)

    @property
    def on_merge(self) -> str:
        return self.optimizer_state

    @property
    def follows_speed(self) -> bool:
        return self.balance

    @property
    def moments(self) -> MomentRounds:
        return moment_rounds(self)

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.period, self.fragments)

    @property
    def reads_parameters(self) -> bool:
        return False

    def begin(self, parameters: Tensor) -> Memory:
        return {AGREED: parameters.clone()}

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        parameters.copy_(memory[AGREED].sub_(mean))


@dataclass(frozen=True, repr=False)
class PostLocalSGD(Strategy):
    """Synchronous training for `start` steps, then LocalSGD(period).

    x <- x - step of the mean gradient, before `start`; then as LocalSGD
    law:    all workers hold the same parameters until `start`, and after each merge
    source: Lin et al. 2020, ICLR

    Lin et al. call `start` t' and the period H. The first merge is after step start + period. torch's
    PeriodicModelAverager(period, warmup_steps=start) averages after step start + 1 first, and then every `period`
    steps: period - 1 steps earlier each time. A compressor's residual of gradients is dropped at `start`, since
    pseudo-gradients have another unit.

    Args:
        period: optimizer steps per round, from `start` on.
        start: number of synchronous steps.
        optimizer_state: the moments at a merge, as in LocalSGD.

    Example:
        >>> gossamer.PostLocalSGD(period=8, start=1000)
        PostLocalSGD(period=8, start=1000)
    """

    period: int
    start: int
    optimizer_state: str = KEEP

    def __post_init__(self) -> None:
        require(self.start >= 1, f"start must be a number of steps, 1 or more, got {self.start}")
        self.local  # noqa: B018 - checks the other arguments

    @property
    def local(self) -> LocalSGD:
        """The strategy from `start` on."""
        return LocalSGD(self.period, optimizer_state=self.optimizer_state)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return GradientStage(0), AveragingStage(self.start, self.local)
