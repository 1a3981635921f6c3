"""DiLoCo: long periods of local training, and an outer Nesterov optimizer for the mean pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback
from gossamer.algorithms.compressors.distortion import kept_share
from gossamer.algorithms.strategies.base import AGREED, AveragingStrategy, Memory
from gossamer.algorithms.strategies.moment_rounds import ALIGN, KEEP, OWN, MomentRounds, check_moments, moment_rounds
from gossamer.algorithms.strategies.schedule import PeriodicSchedule, check_fragments
from gossamer.base.layout import accumulation_dtype
from gossamer.errors import require

MOMENTUM = "momentum"
MEAN, RADIAL = "mean", "radial"
CALM_MOMENTUM = 0.5  # up to this outer momentum, no compressor that was tried did much harm
LEAST_KEPT = 1 / 3  # least share of a pseudo-gradient's energy in a message, for a larger outer momentum


def check_outer_step(learning_rate: float, momentum: float) -> None:
    """Raise ValueError for arguments of an outer step that are out of range."""
    require(learning_rate >= 0, f"outer_learning_rate must be 0 or more, got {learning_rate}")
    require(0 <= momentum < 1, f"outer_momentum must be in [0, 1), got {momentum}")


@dataclass(frozen=True, repr=False)
class DiLoCo(AveragingStrategy):
    """DiLoCo: every worker makes `period` local steps; an outer Nesterov step then follows the mean pseudo-gradient.

    d = mean over workers of v_i = agreed - x_i, or if averaging="radial" for each tensor
    d = (mean |v_i|) u / |u|, u = mean v_i / |v_i|;  m <- outer_momentum m + d
    agreed <- agreed - outer_learning_rate (d + outer_momentum m);  x_i <- mix x_i + (1 - mix) agreed
    law:    outer_learning_rate 1 without momentum is LocalSGD; mix 1 is independent training
    bytes:  the compressor's, each fragment once per period; memory: 3 N, or 2 N without momentum
    source: Douillard et al. 2023, arXiv:2311.08105; Douillard et al. 2025, arXiv:2501.18512 (fragments, delay, mix);
            arXiv:2604.21428 (Decoupled DiLoCo: the radial-directional mean, as third parties describe it)

    The paper calls the period H inner steps, v_i the outer gradient, and agreed the global parameters theta. Streaming
    DiLoCo calls mix alpha, delay tau, and the parts fragments.

    With a delay, the change of `period` steps is sent after step `period` and applied after step `period + delay`. In
    torchft's DiLoCo, fragment_sync_delay counts back from the end: the change of sync_every - fragment_sync_delay steps
    is sent then, and applied after step sync_every. Later rounds have the same distance in both.

    Pseudo-gradients work with any compressor, with feedback if it is biased. SparseLoCo (Sarfi et al. 2025,
    arXiv:2508.15706) is DiLoCo(period=30, outer_learning_rate=1.0, outer_momentum=0.0) +
    Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans(bits=2)), decay=0.95). Its text divides the sum by the
    number of workers, as here; its program divides each entry by the number of workers that sent it.

    averaging="radial" moves each tensor by the mean of the norms of the workers' moves. A plain mean of n uncorrelated
    pseudo-gradients has only 1/sqrt(n) of the norm. It sends one number per tensor in addition. The paper averages
    embeddings plainly; here all tensors are treated alike. Compressors receive directions, and residuals have their
    unit.

    A sparse compressor's residual is sent rounds later, and added to a momentum that continued without it. If outer
    momentum is above 0.5 and a message has less than a third of a pseudo-gradient's energy (for a Gaussian matrix), as
    with TopK(0.05), RandomK and PowerSGD(1), attach prints a warning: in a sweep over one small task such pairs mostly
    ended at a higher loss than without momentum, PowerSGD(1) at 400 times the loss. Both limits are empirical, from
    that sweep.

    Args:
        period: optimizer steps per round.
        outer_learning_rate: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, in [0, 1).
        fragments: number of parts of the parameters, of about equal bytes, that are synchronized in turn.
        delay: steps between sending a pseudo-gradient and applying its mean, below `period`.
        mix: weight of a worker's own parameters when a mean is applied, in [0, 1].
        optimizer_state: the moments at a merge, per fragment: "keep", "align", "average" or "reset"; see LocalSGD.
        first_moment_period: steps between averages of the first moment, a multiple of period; None: see
            optimizer_state.
        second_moment_period: the same for the second moment.
        second_moment: "own", "agreed" or "amsgrad"; see LocalSGD.
        averaging: "mean", or "radial": norms and directions separately.
        balance: local steps by speed instead of equally many; see LocalSGD.

    Example:
        >>> gossamer.DiLoCo(period=50, fragments=5) + gossamer.Float4()
        DiLoCo(period=50, fragments=5) + Float4()
    """

    period: int
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    optimizer_state: str = KEEP
    first_moment_period: int | None = None
    second_moment_period: int | None = None
    second_moment: str = OWN
    averaging: str = MEAN
    balance: bool = False

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")
        check_outer_step(self.outer_learning_rate, self.outer_momentum)
        check_fragments(self.period, self.fragments)
        require(self.delay >= 0, f"delay must be a number of steps, 0 or more, got {self.delay}")
        require(
            self.delay < self.period,
            f"delay must be below period={self.period}, since a fragment is sent again after a period, got "
            f"{self.delay}. Write delay={self.period - 1}.",
        )
        require(0 <= self.mix <= 1, f"mix must be the weight of a worker's own parameters, in [0, 1], got {self.mix}")
        require(
            self.averaging in (MEAN, RADIAL),
            f'averaging must be "{MEAN}" or "{RADIAL}", got {self.averaging!r}. Write '
            f'DiLoCo(period={self.period}, averaging="{RADIAL}").',
        )
        check_moments(self)
        require(
            self.optimizer_state != ALIGN or not (self.delay or self.mix),
            f'optimizer_state="align" corrects momenta relative to the parameters that a worker sent, and with '
            f"delay={self.delay} and mix={self.mix} these have changed since. Omit delay and mix.",
        )
        require(
            self.second_moment == OWN or not self.mix,
            f"mix={self.mix} keeps a part of each worker's own state, so no second moment is equal on all "
            f'workers. Omit mix or second_moment="{self.second_moment}".',
        )

    def caution(self, compressor: Compressor) -> str | None:
        if self.outer_momentum <= CALM_MOMENTUM and not self.radial:
            return None
        for term in compressor.held():
            if isinstance(term, Feedback) and kept_share(term.inner) < LEAST_KEPT:
                if self.radial:
                    return (
                        f'averaging="{RADIAL}" scales the few entries of {term.inner!r} to the norm of complete '
                        f'pseudo-gradients; the residual is sent in addition. Write averaging="{MEAN}", or a denser '
                        "compressor, such as OneBit() or Float4()"
                    )
                return (
                    f"a message of {term.inner!r} has {max(0, kept_share(term.inner)):.0%} of a pseudo-gradient's "
                    f"energy. The residual is sent rounds later, and added to an outer momentum of "
                    f"{self.outer_momentum:g} that continued without it: training may converge worse than without "
                    f"momentum, or diverge. In that case write DiLoCo(period={self.period}, outer_learning_rate=1.0, "
                    f"outer_momentum=0.0), as in SparseLoCo (arXiv:2508.15706), an outer_momentum of at most "
                    f"{CALM_MOMENTUM:g}, or a denser compressor, such as OneBit() or Float4()"
                )
        return None

    @property
    def radial(self) -> bool:
        return self.averaging == RADIAL

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
        return PeriodicSchedule(self.period, self.fragments, self.delay)

    @property
    def kept_share(self) -> float:
        return self.mix

    @property
    def reads_parameters(self) -> bool:
        return self.mix > 0

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


# -- the radial-directional mean: norms and directions of pseudo-gradients are averaged separately, per tensor ---------


def split_lengths(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Divide each tensor of `flat`, (n,), by its norm, and return the norms: (tensors,).

    A tensor of zeros is unchanged.
    """
    lengths = _norms(flat, sizes)
    _scale(flat, sizes, 1 / lengths.where(lengths > 0, torch.ones_like(lengths)))
    return lengths


def restore_lengths(directions: Tensor, sizes: Sequence[int], lengths: Tensor) -> None:
    """Scale each tensor of `directions`, (n,), to the given norm; a mean without a direction stays zero."""
    norms = _norms(directions, sizes)
    _scale(directions, sizes, (lengths / norms).where(norms > 0, torch.zeros_like(norms)))


def _norms(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    dtype = accumulation_dtype(flat.dtype)
    norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in flat.split(list(sizes))]
    return torch.stack(norms) if norms else flat.new_empty(0, dtype=dtype)


def _scale(flat: Tensor, sizes: Sequence[int], factors: Tensor) -> None:
    """Scale each tensor of `flat`, in the dtype of the factors: theirs may be out of the range of half precision."""
    for part, factor in zip(flat.split(list(sizes)), factors, strict=True):
        part.copy_(part.to(factors.dtype).mul_(factor))
