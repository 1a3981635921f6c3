"""Sign: moves parameters by the learning rate, up or down, as what arrives says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.train.moments.transfer import Group, MomentumTransfer, refuse_settings

NOT_FOLLOWED = ("momentum", "dampening", "maximize", "amsgrad")  # of SGD, of Adam, of both


class SignDescent(MomentumTransfer):
    """p -= lr (weight_decay p + sign(what arrives)), for SGD and Adam alike; nothing is remembered.

    An optimizer's lr and weight decay are followed as they are at each step. The decay acts on parameters, as AdamW's,
    since a sign would drown it otherwise. Adam's betas and epsilon have no part in it, nor what Adam remembers.
    """

    def check(self, group: Group) -> None:
        refuse_settings(group, *(setting for setting in NOT_FOLLOWED if setting in group))

    def read(self, group: Group) -> Moments:
        return NO_MOMENTS

    def notices(self) -> Iterable[str]:
        yield (
            f"{len(self.names)} tensors will move by the learning rate and the sign of what arrives, and by weight "
            "decay; of the optimizer only these two are followed, and it remembers nothing about them"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        gradients = [parameter.grad for parameter in owned if parameter.grad is not None]
        if owned and decay:
            torch._foreach_mul_(list(owned), 1 - lr * decay)
        if owned:
            torch._foreach_add_(list(owned), torch._foreach_sign(gradients), alpha=-lr)
        return ()
