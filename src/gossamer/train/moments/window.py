"""Window: runs Adam on the moments of the last few received gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.train.moments.first_moment import AdamRule, AdamState, corrections
from gossamer.train.moments.transfer import Group

WINDOW = "window"


class WindowedMoments(AdamRule):
    """MicroAdam: m = (1 - b1) / (1 - b1^t) sum over r of b1^r g_(t-r), v the same for squares with b2.

    The optimizer's state has a ring buffer of the last gradients, (window, *shape), and the moments, from which Adam
    could continue.
    """

    arrives_with_momentum = False

    def notices(self) -> Iterable[str]:
        yield (f"the moments of {len(self.names)} tensors are those of the last {self.owner.window} received gradients")

    def read(self, group: Group) -> Moments:
        return NO_MOMENTS  # gradients are sent without momentum

    def _moments(self, state: AdamState, gradient: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        length, now = self.owner.window, int(state["step"]) - 1
        if WINDOW not in state:
            state[WINDOW] = gradient.new_zeros((length, *gradient.shape))
        ring, (first, second) = state[WINDOW], group["betas"]
        ring[now % length].copy_(gradient)
        moment, variance = state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        for age in reversed(range(length)):
            arrived = ring[(now - age) % length]
            moment.mul_(first).add_(arrived, alpha=1 - first)
            variance.mul_(second).addcmul_(arrived, arrived, value=1 - second)
        of_first, of_second = corrections(state, group)
        return moment / of_first, (variance / of_second).sqrt_().add_(group["eps"])
