"""Shared variance: runs Adam in local steps on a second moment that all workers averaged in the last round."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.errors import AttachError
from gossamer.train.moments.first_moment import AdamRule, AdamState, corrections
from gossamer.train.moments.transfer import Group

SHARED = "shared_exp_avg_sq"  # in the optimizer's state: bias corrected, the same on all ranks between two rounds


class SharedVariance(AdamRule):
    """Adam with steps divided by the shared second moment; its own moments are updated as Adam's.

    p -= lr m / (1 - b1^t) / (sqrt(shared) + eps), where shared is v / (1 - b2^t) until the first round.
    """

    arrives_with_momentum = False

    def check(self, group: Group) -> None:
        if group["amsgrad"]:
            raise AttachError(
                "amsgrad=True keeps the largest second moment of each worker, but local steps divide by the one that "
                'all workers have averaged. Leave amsgrad out, and write second_moment="amsgrad" in the recipe.'
            )
        super().check(group)

    def notices(self) -> Iterable[str]:
        return ()

    def read(self, group: Group) -> Moments:
        return NO_MOMENTS  # momentum stays in the optimizer

    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment = state["exp_avg"].lerp_(gradient, 1 - first)
        variance = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        of_first, of_second = corrections(state, group)
        shared = state[SHARED] if SHARED in state else variance / of_second
        return moment / of_first, shared.sqrt().add_(group["eps"])


@torch.no_grad()
def share_variance(optimizer: Optimizer, parameters: Iterable[Parameter], *, keeps_largest: bool) -> None:
    """Share the second moments of these parameters, which were just averaged over all ranks, until the next round.

    Args:
        keeps_largest: keep entries that were larger in an earlier round (AMSGrad).
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if not state or not float(state["step"]):  # no step yet
            continue
        _, of_second = corrections(state, groups[id(parameter)])
        agreed = state["exp_avg_sq"] / of_second
        state[SHARED] = torch.maximum(state[SHARED], agreed) if keeps_largest and SHARED in state else agreed


def forget_shared_variance(optimizer: Optimizer) -> None:
    """Remove shared second moments: a later stage would divide by them until its first round."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            state.pop(SHARED, None)
