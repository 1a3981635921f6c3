"""Momentum transfer: divides an optimizer's work between it and the compressor, around every optimizer step.

The user's parameter groups are never modified: schedulers and checkpoints see their own values. During the optimizer's
step, temporary groups without momentum replace them for parameters with momentum in the compressor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors.ownership import Ownership
from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.errors import AttachError, LoopError
from gossamer.events import notice

Group = dict[str, Any]


class MomentumTransfer(ABC):
    """Lets the compressor apply the momentum of the parameters in `owned`, by the rule of `owner`. Call `before` and
    `after` around every optimizer step, and `after` before the optimizer's groups are saved: a step may have failed.

    warns: whether to print a notice, once, about gradients that were changed after averaging.
    """

    arrives_with_momentum = True  # whether received values include more than a gradient, so that clipping loses a part

    def __init__(self, optimizer: Optimizer, owned: Mapping[str, Parameter], owner: Ownership, *, warns: bool) -> None:
        self.optimizer, self.owner = optimizer, owner
        self.names = {id(parameter): name for name, parameter in owned.items()}
        self._groups: list[Group] = []
        self._warns = warns
        self._refuse_unheld(owned)
        self.now()

    def _refuse_unheld(self, owned: Mapping[str, Parameter]) -> None:
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in owned.items():
            if id(parameter) not in held:
                raise AttachError(
                    f'"{name}" is not in this optimizer, so its gradient would get momentum twice: from the '
                    "compressor and from the optimizer that updates it. Add it to this optimizer, freeze it, or send "
                    f"it by Route(..., names='{name}')."
                )

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise AttachError for settings that this compressor does not support."""

    @abstractmethod
    def read(self, group: Group) -> Moments:
        """The moments of a group, as returned by `now`."""

    @abstractmethod
    def notices(self) -> Iterable[str]:
        """Notices about which momentum moves, and when."""

    @abstractmethod
    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        """Update parameters with momentum in the compressor, and return the groups left for the optimizer."""

    def now(self) -> Moments:
        """The optimizer's current settings that the compressor applies."""
        for group in self._owning_groups():
            self.check(group)
        found = sorted({self.read(group) for group in self._owning_groups()})
        if len(found) > 1:
            raise AttachError(
                f"the optimizer's groups have different momenta, {found}, but the compressor supports one only. Give "
                "all groups the same, also in schedulers that change it, or send the parameters that differ by "
                "Route(..., names='their.names.*')."
            )
        return found[0] if found else NO_MOMENTS

    @torch.no_grad()
    def before(self, steps: int, *, closure: bool = False, touched: bool = False) -> None:
        """Prepare for the optimizer's use of the gradients of step `steps`, or of a closure's.

        Args:
            steps: number of steps made.
            closure: whether the step has a closure.
            touched: whether the gradients were modified since they were averaged.
        """
        self.after()
        if closure:
            raise LoopError(
                "momentum that a compressor applies reaches the optimizer before its step, but a closure computes "
                "gradients within it. Call loss.backward() and then optimizer.step(), without a closure."
            )
        if steps <= self.owner.start:
            return
        if hasattr(self.optimizer, "found_inf"):  # set by a GradScaler
            raise LoopError(
                "a fused optimizer divides gradients by the loss scale itself, but weight decay and momentum of the "
                "compressor would not be divided. Build it with fused=False."
            )
        if touched and self._warns and self.arrives_with_momentum:
            self._warns = False
            notice(
                "gradients were changed between loss.backward() and optimizer.step(), for example by clipping. They "
                "include momentum and were sent already, so the clipped part is lost. Clip in the compressor: "
                "DGC(clip=1.0)"
            )
        groups = self.optimizer.param_groups
        self._groups = list(groups)
        groups[:] = [part for group in self._groups for part in self._parts(group) if part["params"]]

    def _parts(self, group: Group) -> Iterable[Group]:
        owned = [parameter for parameter in group["params"] if id(parameter) in self.names]
        others = [parameter for parameter in group["params"] if id(parameter) not in self.names]
        return group | {"params": others}, *self.step(group, [p for p in owned if p.grad is not None])

    def after(self) -> None:
        """Restore the groups after the optimizer's step. Idempotent."""
        if self._groups:
            self.optimizer.param_groups[:] = self._groups
            self._groups = []

    def _owning_groups(self) -> list[Group]:
        return [group for group in self.optimizer.param_groups if any(id(p) in self.names for p in group["params"])]


def refuse_settings(group: Group, *settings: str) -> None:
    for setting in settings:
        if group[setting]:
            raise AttachError(
                f"{setting}={group[setting]} is not supported for momentum that a compressor applies in place of the "
                f"optimizer. Leave {setting} out, or use TopK(density=0.01)."
            )


# -- SGD: momentum before sending --------------------------------------------------------------------------------------


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


# -- Adam: whole steps are received ------------------------------------------------------------------------------------


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


# -- steps by the sign of received values ------------------------------------------------------------------------------


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
