"""Whole step: applies received values as Adam's step, except the learning rate; each worker keeps its moments."""

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
                f"weight_decay={group['weight_decay']} of Adam is added before its moments, but here workers compute "
                "moments from gradients alone. Train with torch.optim.AdamW(model.parameters(), ...), which decays "
                "parameters directly."
            )

    def read(self, group: Group) -> Moments:
        first, second = (float(beta) for beta in group["betas"])
        return Moments(first, second_beta=second, epsilon=float(group["eps"]))

    def notices(self) -> Iterable[str]:
        yield (
            f"the moments of {len(self.names)} tensors moved from the optimizer to the compressor: every worker keeps "
            "its own and sends the resulting step; the learning rate and weight decay stay. Such a step does not "
            "depend on a factor of the gradient, so batch weights have no effect"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        lr = float(group["lr"])
        for parameter in owned:
            assert parameter.grad is not None
            parameter.mul_(1 - lr * group["weight_decay"]).sub_(parameter.grad, alpha=lr)
        return ()
