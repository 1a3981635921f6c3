"""Whole step: applies what arrives as Adam's step but for the learning rate; moments were kept before it travelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.nn import Parameter

from gossamer.base.aggregation import Moments
from gossamer.errors import AttachError
from gossamer.train.moments.transfer import Group, MomentumTransfer, refuse_settings


class WholeStep(MomentumTransfer):
    """p -= lr u, and AdamW's weight decay; the optimizer keeps no moments of these parameters."""

    def check(self, group: Group) -> None:
        refuse_settings(group, "amsgrad", "maximize")
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise AttachError(
                f"weight_decay={group['weight_decay']} of Adam goes through its moments, and these are made before "
                "anything travels, from gradients alone. Train with torch.optim.AdamW(model.parameters(), ...), whose "
                "decay does not."
            )

    def read(self, group: Group) -> Moments:
        first, second = (float(beta) for beta in group["betas"])
        return Moments(first, second_beta=second, epsilon=float(group["eps"]))

    def notices(self) -> Iterable[str]:
        yield (
            f"the moments of {len(self.names)} tensors moved out of the optimizer: every worker keeps its own, and "
            "sends the step that follows from them; the learning rate and weight decay stay. A factor of a gradient "
            "cancels out in such a step, so weights of batches do not count"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        lr = float(group["lr"])
        for parameter in owned:
            assert parameter.grad is not None
            parameter.mul_(1 - lr * group["weight_decay"]).sub_(parameter.grad, alpha=lr)
        return ()
