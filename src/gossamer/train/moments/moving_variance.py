"""Moving variance: runs Adam on a first moment that travels, and a second that follows from what arrives."""

from __future__ import annotations

from torch import Tensor

from gossamer.train.moments.first_moment import AdamRule, AdamState, corrections
from gossamer.train.moments.transfer import Group


class MomentumVariance(AdamRule):
    """AdamS: v' = b2 m^2 + (1 - b2) g^2 with the moment before, and p -= lr m' / (sqrt(v') + eps).

    Nothing but m is remembered. v' lies where Adam's own would be, so that Adam can go on from it.
    """

    def _moments(self, state: AdamState, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        variance.copy_(moment).square_().mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return moment.lerp_(gradient, 1 - first), variance.sqrt().add_(group["eps"])


class AgreedVariance(AdamRule):
    """Adam with its bias correction, whose v stays as it is where nothing arrived."""

    def _moments(self, state: AdamState, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        moment.lerp_(gradient, 1 - first)
        variance.copy_(
            (variance * second).addcmul_(gradient, gradient, value=1 - second).where(gradient != 0, variance)
        )
        of_first, of_second = corrections(state, group)
        return moment / of_first, (variance / of_second).sqrt_().add_(group["eps"])
