"""Momentum transfer: divides an optimizer's work between it and the compressor, around every optimizer step.

The user's parameter groups are never modified: schedulers and checkpoints see their own values. During the optimizer's
step, temporary groups without momentum replace them for parameters with momentum in the compressor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors.ownership import Ownership
from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.errors import AttachError, LoopError
from gossamer.events import notice

Group = dict[str, Any]


class MomentumTransfer(ABC):
    """Lets the compressor apply the momentum of the parameters in `owned`, by the rule of `owner`. Call `before` and
    `after` around every optimizer step.

    warns: whether to print a notice, once, about gradients that were changed after averaging.
    """

    arrives_with_momentum = True  # whether received values include more than a gradient, so that clipping loses a part

    def __init__(self, optimizer: Optimizer, owned: Mapping[str, Parameter], owner: Ownership, *, warns: bool) -> None:
        self.optimizer, self.owner = optimizer, owner
        self.names = {id(parameter): name for name, parameter in owned.items()}
        self._groups: list[Group] = []
        self._warns = warns
        optimizer.register_state_dict_pre_hook(lambda _: self.after())  # restores groups after an error within a step
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
