"""Velocity: applies SGD's momentum in the compressor, before gradients are sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.base.aggregation import Moments
from gossamer.train.moments.transfer import Group, MomentumTransfer, refuse_settings


class SGDMomentumTransfer(MomentumTransfer):
    """SGD: received gradients include their momentum; weight decay has momentum of its own, equal on every rank.

    SGD is linear: the momentum of (gradient + decay) is the sum of both. That of the decay stays in the optimizer's
    momentum_buffer.
    """

    def check(self, group: Group) -> None:
        refuse_settings(group, "dampening", "maximize")

    def read(self, group: Group) -> Moments:
        return Moments(float(group["momentum"]), bool(group["nesterov"]))

    def notices(self) -> Iterable[str]:
        yield (
            f"the momentum of {len(self.names)} tensors moved from the optimizer to the compressor, which applies it "
            "before sending, with the optimizer's current settings at each step; weight decay stays"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        momentum, nesterov, *_ = self.read(group)
        for parameter in owned:
            buffer = self._buffer(parameter, group["weight_decay"])
            if buffer is not None:
                decay = parameter * group["weight_decay"]
                buffer.mul_(momentum).add_(decay)
                parameter.sub_((decay.add_(buffer, alpha=momentum) if nesterov else buffer) * group["lr"])
        yield group | {"params": owned, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}

    def _buffer(self, parameter: Parameter, weight_decay: float) -> Tensor | None:
        """None without weight decay and without momentum from before this session."""
        buffer: Tensor | None = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is None and weight_decay:
            buffer = self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return buffer
