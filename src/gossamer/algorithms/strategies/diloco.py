"""DiLoCo: local training for long periods; an outer Nesterov optimizer follows the mean pseudo-gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback
from gossamer.algorithms.compressors.distortion import kept_share
from gossamer.algorithms.strategies.base import AGREED, AveragingStrategy, Memory
from gossamer.algorithms.strategies.moment_rounds import ALIGN, KEEP, OWN, MomentRounds, check_moments, moment_rounds
from gossamer.algorithms.strategies.schedule import PeriodicSchedule
from gossamer.errors import require

MOMENTUM = "momentum"
MEAN, RADIAL = "mean", "radial"
CALM_MOMENTUM = 0.5  # up to which outer momentum did little harm to any compressor that was tried
LEAST_KEPT = 1 / 3  # of a difference's energy in one message, where outer momentum is larger


@dataclass(frozen=True, repr=False)
class DiLoCo(AveragingStrategy):
    """Let every worker make `period` steps of its own; an outer Nesterov step follows the mean of where they went.

    d = mean over workers of v_i = agreed - x_i, or if averaging="radial" for each tensor
    d = (mean |v_i|) u / |u|, u = mean v_i / |v_i|;  m <- outer_momentum m + d
    agreed <- agreed - outer_learning_rate (d + outer_momentum m);  x_i <- mix x_i + (1 - mix) agreed
    law:    outer_learning_rate 1 without momentum is LocalSGD; mix 1 is training apart
    bytes:  the compressor's, each fragment once per period; memory: 3 N, or 2 N without momentum
    source: Douillard et al. 2023, arXiv:2311.08105; Douillard et al. 2025, arXiv:2501.18512 (fragments, delay, mix);
            arXiv:2604.21428 (Decoupled DiLoCo: the radial-directional mean, as third parties describe it)

    With a delay, what changed in `period` steps leaves after step `period` and lands after step `period + delay`. In
    torchft's DiLoCo, fragment_sync_delay counts back from the end: what changed in sync_every - fragment_sync_delay
    steps leaves then, and lands after step sync_every. Later rounds are equally far apart in both.

    Pseudo-gradients, agreed - x_i, go through any compressor, with feedback where it is biased. SparseLoCo (Sarfi et
    al. 2025, arXiv:2508.15706) is DiLoCo(period=30, outer_learning_rate=1.0, outer_momentum=0.0) +
    Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans(bits=2)), decay=0.95). Its text divides the sum by the
    number of workers, as here; its program divides each entry by the number of workers that sent it.
    Moments and second_moment are those of LocalSGD.

    averaging="radial" moves each tensor as far as the workers moved it on average. A plain mean of n differences that
    point apart is only 1/sqrt(n) as long. One number per tensor travels in addition. The paper averages embeddings
    plainly; here all tensors are averaged alike. Compressors see directions, and their residuals are in these units.

    What such a compressor leaves out waits for rounds, and comes to a momentum that has gone on without it. Where outer
    momentum is above 0.5 and a message holds less than a third of a difference (of the energy of a Gaussian matrix), as
    TopK(0.05), RandomK and PowerSGD(1) do, attach says so: in a sweep over one small task such pairs mostly ended worse
    than without momentum, PowerSGD(1) 400 times. The two bounds are read off that sweep; theory gives none.
    """

    period: int  # steps of the optimizer
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1  # parts of the parameters that take turns, of about equal bytes
    delay: int = 0  # steps that a round may travel while training goes on
    mix: float = 0.0  # share of its own parameters that a worker keeps when a round lands
    optimizer_state: str = KEEP  # of each fragment: "keep", "align", "average" (dense) or "reset" it
    first_moment_period: int | None = None  # steps between two means of it, a multiple of period; None: as above
    second_moment_period: int | None = None  # likewise
    second_moment: str = OWN  # that Adam's local steps divide by: each worker's "own", the "agreed" one, or "amsgrad"
    averaging: str = MEAN  # of differences: their "mean", or "radial": lengths and directions apart

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period is a number of steps, 1 or more, not {self.period}")
        require(self.outer_learning_rate >= 0, f"outer_learning_rate is 0 or more, not {self.outer_learning_rate}")
        require(0 <= self.outer_momentum < 1, f"outer_momentum is a fraction in [0, 1), not {self.outer_momentum}")
        require(self.fragments >= 1, f"fragments is a number of parts, 1 or more, not {self.fragments}")
        require(self.delay >= 0, f"delay is a number of steps, 0 or more, not {self.delay}")
        require(
            self.fragments <= self.period,
            f"{self.fragments} fragments do not find a turn each in a period of {self.period} steps: write "
            f"fragments={self.period} at most",
        )
        require(
            self.delay < self.period,
            f"a difference that travels for {self.delay} steps would land after its fragment's next turn, in "
            f"a period of {self.period}: write delay={self.period - 1} at most",
        )
        require(0 <= self.mix <= 1, f"mix is the share in [0, 1] of its own that a worker keeps, not {self.mix}")
        require(
            self.averaging in (MEAN, RADIAL),
            f'averaging must be "{MEAN}" or "{RADIAL}", got {self.averaging!r}. Write '
            f'DiLoCo(period={self.period}, averaging="{RADIAL}").',
        )
        check_moments(*self._moment_settings)
        require(
            self.optimizer_state != ALIGN or not (self.delay or self.mix),
            f'optimizer_state="align" corrects momenta from where this worker stood when a round left, and with '
            f"delay={self.delay} and mix={self.mix} it has gone on from there. Leave these out.",
        )
        require(
            self.second_moment == OWN or not self.mix,
            f"mix={self.mix} keeps a share of each worker's own state, so that no second moment is the same on all "
            f'workers. Leave out mix or second_moment="{self.second_moment}".',
        )

    @property
    def _moment_settings(self) -> tuple[int, str, int | None, int | None, str]:
        periods = self.first_moment_period, self.second_moment_period
        return self.period, self.optimizer_state, *periods, self.second_moment

    def caution(self, compressor: Compressor) -> str | None:
        if self.outer_momentum <= CALM_MOMENTUM and not self.radial:
            return None
        for term in compressor.held():
            if isinstance(term, Feedback) and kept_share(term.inner) < LEAST_KEPT:
                if self.radial:
                    return (
                        f'averaging="{RADIAL}" moves the few entries of {term.inner!r} as far as whole differences go, '
                        f'and the rest is sent later in addition. Write averaging="{MEAN}", or a compressor that holds '
                        "more, such as OneBit() or Float4()"
                    )
                return (
                    f"a message of {term.inner!r} holds {max(0, kept_share(term.inner)):.0%} of a difference. The rest "
                    f"waits for rounds and comes to an outer momentum of {self.outer_momentum:g} that has gone on "
                    "without it, under which training may end worse than without momentum, or diverge. If it does, "
                    f"write DiLoCo(period={self.period}, outer_learning_rate=1.0, outer_momentum=0.0), without "
                    f"momentum as in SparseLoCo (arXiv:2508.15706), an outer_momentum of {CALM_MOMENTUM:g} at most, or "
                    "a compressor that holds more, such as OneBit() or Float4()"
                )
        return None

    @property
    def radial(self) -> bool:
        return self.averaging == RADIAL

    @property
    def on_merge(self) -> str:
        return self.optimizer_state

    @property
    def moments(self) -> MomentRounds:
        return moment_rounds(*self._moment_settings)

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.period, self.fragments, self.delay)

    @property
    def kept_share(self) -> float:
        return self.mix

    def begin(self, parameters: Tensor) -> Memory:
        momentum = {MOMENTUM: torch.zeros_like(parameters)} if self.outer_momentum else {}
        return {AGREED: parameters.clone(), **momentum}

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        agreed, step = memory[AGREED], mean
        if self.outer_momentum:
            momentum = memory[MOMENTUM].mul_(self.outer_momentum).add_(mean)
            step = mean.add_(momentum, alpha=self.outer_momentum)
        agreed.sub_(step, alpha=self.outer_learning_rate)
        if self.mix:
            parameters.mul_(self.mix).add_(agreed, alpha=1 - self.mix)
        else:
            parameters.copy_(agreed)

    def restart(self, parameters: Tensor, memory: Memory) -> None:
        memory[AGREED] = parameters.clone()
