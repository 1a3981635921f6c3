"""Frozen variance: runs Adam on an averaged first moment, and a second moment that is frozen after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from gossamer.errors import LoopError
from gossamer.train.moments.first_moment import AdamRule, AdamState
from gossamer.train.moments.transfer import Group

LEAST_VARIANCE = 0.5  # minimum share of its limit after the warm-up; below it there is a warning


class FrozenVariance(AdamRule):
    """p -= lr m / (sqrt(v) + eps) without bias correction, and only where v is not 0."""

    about = "will be frozen"

    def notices(self) -> Iterable[str]:
        yield from super().notices()
        start = self.owner.start
        found = min((1 - group["betas"][1] ** start for group in self._owning_groups()), default=1.0)
        if found < LEAST_VARIANCE:
            yield (
                f"a warm-up of {start} steps reaches {found:.0%} of the variance, so steps with the frozen variance "
                f"are {found**-0.5:.1f} times as long: warm up for longer, or give the optimizer a smaller second beta"
            )

    def _begin(self, parameter: Parameter, group: Group) -> AdamState:
        raise LoopError(
            f'"{self.names[id(parameter)]}" has its first gradient after the warm-up, so its variance is not known '
            f"and it would never move. Warm up until every parameter was used: {self.owner.start} steps were too few."
        )

    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        variance = self._variance(state["exp_avg_sq"])
        moment = state["exp_avg"].lerp_(gradient, 1 - group["betas"][0]).mul_(variance != 0)
        return moment, variance.sqrt().add_(group["eps"])

    def _variance(self, known: Tensor) -> Tensor:
        return known


class RowVariance(FrozenVariance):
    """The same with one number for each row of a matrix, the mean of its entries' v."""

    about = "will be frozen, one number per row"

    def _variance(self, known: Tensor) -> Tensor:
        return known if known.dim() < 2 else known.mean(tuple(range(1, known.dim())), keepdim=True).expand_as(known)
