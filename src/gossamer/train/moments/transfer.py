"""Momentum transfer: divides an optimizer's work between it and the compressor, around every optimizer step.

The user's parameter groups are never written: schedulers and checkpoints see their own numbers. During the optimizer's
step, temporary groups replace them, in which the parameters whose momentum has moved have none.
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
    """The compressor applies the momentum of the parameters in `owned`, as `owner` says. `before` and `after` surround
    every optimizer step.

    warns: whether to tell the user, once, of gradients that were changed after averaging.
    """

    arrives_with_momentum = True  # whether what arrives is more than a gradient, so that clipping it would lose

    def __init__(self, optimizer: Optimizer, owned: Mapping[str, Parameter], owner: Ownership, *, warns: bool) -> None:
        self.optimizer, self.owner = optimizer, owner
        self.names = {id(parameter): name for name, parameter in owned.items()}
        self._groups: list[Group] = []
        self._warns = warns
        optimizer.register_state_dict_pre_hook(lambda _: self.after())  # what raised within a step left its groups
        self._refuse_unheld(owned)
        self.now()

    def _refuse_unheld(self, owned: Mapping[str, Parameter]) -> None:
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in owned.items():
            if id(parameter) not in held:
                raise AttachError(
                    f'"{name}" is not in this optimizer, and its gradient would get momentum twice: from the '
                    "compressor, and from whatever trains it. Put it into the optimizer, freeze it, or send it by "
                    f"Route(..., names='{name}')."
                )

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise AttachError for settings that this compressor would not honour."""

    @abstractmethod
    def read(self, group: Group) -> Moments:
        """A group's as `now` gives them."""

    @abstractmethod
    def notices(self) -> Iterable[str]:
        """Lines for the user: which momentum moves, and when."""

    @abstractmethod
    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        """Update parameters whose momentum has moved, in the optimizer's place; returns the groups left for it."""

    def now(self) -> Moments:
        """What the compressor applies of the optimizer's, as the optimizer has it at this moment."""
        for group in self._owning_groups():
            self.check(group)
        found = sorted({self.read(group) for group in self._owning_groups()})
        if len(found) > 1:
            raise AttachError(
                f"the optimizer's groups have different momenta, {found}, and what the compressor adds up and sends "
                "can have one only. Give all groups the same, also in schedulers that move it, or send the parameters "
                "that differ by Route(..., names='their.names.*')."
            )
        return found[0] if found else NO_MOMENTS

    @torch.no_grad()
    def before(self, steps: int, *, closure: bool = False, touched: bool = False) -> None:
        """The optimizer is about to use the gradients of step `steps`, or a closure's.

        touched: they were written to since they were averaged.
        """
        self.after()
        if closure:
            raise LoopError(
                "momentum that a compressor applies reaches the optimizer before its step, and a closure computes "
                "gradients within it. Call loss.backward() and then optimizer.step(), without a closure."
            )
        if steps <= self.owner.start:
            return
        if hasattr(self.optimizer, "found_inf"):  # left there by a GradScaler
            raise LoopError(
                "a fused optimizer takes the loss scale out of gradients by itself, and weight decay or momentum that "
                "was taken over would go wrong. Build it with fused=False."
            )
        if touched and self._warns and self.arrives_with_momentum:
            self._warns = False
            notice(
                "gradients were changed between loss.backward() and optimizer.step(), by clipping perhaps. They have "
                "momentum in them and were sent already, so what is cut off there is lost. Clip in the compressor: "
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
        """The optimizer has made its step, or never will. Idempotent."""
        if self._groups:
            self.optimizer.param_groups[:] = self._groups
            self._groups = []

    def _owning_groups(self) -> list[Group]:
        return [group for group in self.optimizer.param_groups if any(id(p) in self.names for p in group["params"])]


def refuse_settings(group: Group, *settings: str) -> None:
    for setting in settings:
        if group[setting]:
            raise AttachError(
                f"{setting}={group[setting]} has no meaning for momentum that a compressor applies in the optimizer's "
                f"place. Leave {setting} out, or send by TopK(density=0.01)."
            )
