"""Moving variance: runs Adam on an averaged first moment, and a second moment computed from the received values."""

from __future__ import annotations

from torch import Tensor

from gossamer.train.moments.first_moment import AdamRule, AdamState, corrections
from gossamer.train.moments.transfer import Group


class MomentumVariance(AdamRule):
    """AdamS: v' = b2 m^2 + (1 - b2) g^2 with the previous moment, and p -= lr m' / (sqrt(v') + eps).

    Only m is kept. v' is stored in place of Adam's own second moment, so that Adam could continue from it.
    """

    def _moments(self, state: AdamState, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        variance.copy_(moment).square_().mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return moment.lerp_(gradient, 1 - first), variance.sqrt().add_(group["eps"])


class AgreedVariance(AdamRule):
    """Adam with bias correction; v is unchanged where the received value is 0."""

    def _moments(self, state: AdamState, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        moment.lerp_(gradient, 1 - first)
        variance.copy_(
            (variance * second).addcmul_(gradient, gradient, value=1 - second).where(gradient != 0, variance)
        )
        of_first, of_second = corrections(state, group)
        return moment / of_first, (variance / of_second).sqrt_().add_(group["eps"])
