"""Sign: moves parameters by the learning rate times the sign of the received values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.train.moments.transfer import Group, MomentumTransfer, refuse_settings

NOT_FOLLOWED = ("momentum", "dampening", "maximize", "amsgrad")  # of SGD, of Adam, of both


class SignDescent(MomentumTransfer):
    """p -= lr (weight_decay p + sign(received)), for SGD and Adam; it has no state.

    It uses the optimizer's current lr and weight decay at each step. The decay is applied to parameters, as in AdamW,
    since the sign of a sum with the gradient would lose it. Adam's betas, epsilon and state are not used.
    """

    def check(self, group: Group) -> None:
        refuse_settings(group, *(setting for setting in NOT_FOLLOWED if setting in group))

    def read(self, group: Group) -> Moments:
        return NO_MOMENTS

    def notices(self) -> Iterable[str]:
        yield (
            f"{len(self.names)} tensors will move by the learning rate and the sign of received values, and by weight "
            "decay; these are the only settings of the optimizer in use, and it keeps no state for these tensors"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        gradients = [parameter.grad for parameter in owned if parameter.grad is not None]
        if owned and decay:
            torch._foreach_mul_(list(owned), 1 - lr * decay)
        if owned:
            torch._foreach_add_(list(owned), torch._foreach_sign(gradients), alpha=-lr)
        return ()
