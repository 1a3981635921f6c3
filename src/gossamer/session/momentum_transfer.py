"""Momentum transfer: lets the compressor apply SGD's or Adam's momentum in the optimizer's place.

The user's parameter groups are never written: schedulers and checkpoints see their own numbers. During the optimizer's
step, temporary groups replace them, in which the parameters whose momentum has moved have none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from gossamer.compressors import Compressor
from gossamer.compressors.base import Ownership
from gossamer.core.aggregation import AggregationContext
from gossamer.errors import AttachError, LoopError
from gossamer.events import notice
from gossamer.reducer.bucket import slot_of

Group = dict[str, Any]

LEAST_VARIANCE = 0.5  # share of its limit that a warm-up should find; below it the user is warned


class Momentum(ABC):
    """Division of momentum between optimizer and compressor. `before` and `after` surround every optimizer step."""

    @abstractmethod
    def now(self) -> tuple[float, bool]:
        """(momentum, whether it is Nesterov's) for the compressor, as the optimizer has it at this moment."""

    @abstractmethod
    def before(self, steps: int, *, closure: bool = False, touched: bool = False) -> None:
        """The optimizer is about to use the gradients of step `steps`, or a closure's.

        touched: they were written to since they were averaged.
        """

    @abstractmethod
    def after(self) -> None:
        """The optimizer has made its step, or never will; harmless when said again."""


class KeepMomentum(Momentum):
    """The optimizer applies all momentum."""

    def now(self) -> tuple[float, bool]:
        return 0.0, False

    def before(self, steps: int, *, closure: bool = False, touched: bool = False) -> None:
        pass

    def after(self) -> None:
        pass


class MomentumTransfer(Momentum):
    """The compressor applies the momentum of the parameters in `owned`, after `start` steps.

    warns: whether to tell the user, once, of gradients that were changed after averaging.
    """

    def __init__(self, optimizer: Optimizer, owned: Mapping[str, Parameter], start: int, *, warns: bool) -> None:
        self.optimizer, self.start = optimizer, start
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
    def read(self, group: Group) -> tuple[float, bool]:
        """A group's momentum as `now` gives it."""

    @abstractmethod
    def notices(self) -> Iterable[str]:
        """Lines for the user: which momentum moves, and when."""

    @abstractmethod
    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        """Update parameters whose momentum has moved, in the optimizer's place; returns the groups left for it."""

    def now(self) -> tuple[float, bool]:
        for group in self._owning_groups():
            self.check(group)
        found = sorted({self.read(group) for group in self._owning_groups()})
        if len(found) > 1:
            raise AttachError(
                f"the optimizer's groups have different momenta, {found}, and what the compressor adds up and sends "
                "can have one only. Give all groups the same, also in schedulers that move it, or send the parameters "
                "that differ by Route(..., names='their.names.*')."
            )
        return found[0] if found else (0.0, False)

    @torch.no_grad()
    def before(self, steps: int, *, closure: bool = False, touched: bool = False) -> None:
        self.after()
        if closure:
            raise LoopError(
                "momentum that a compressor applies reaches the optimizer before its step, and a closure computes "
                "gradients within it. Call loss.backward() and then optimizer.step(), without a closure."
            )
        if steps <= self.start:
            return
        if hasattr(self.optimizer, "found_inf"):  # left there by a GradScaler
            raise LoopError(
                "a fused optimizer takes the loss scale out of gradients by itself, and weight decay or momentum that "
                "was taken over would go wrong. Build it with fused=False."
            )
        if touched and self._warns:
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
        if self._groups:
            self.optimizer.param_groups[:] = self._groups
            self._groups = []

    def _owning_groups(self) -> list[Group]:
        return [group for group in self.optimizer.param_groups if any(id(p) in self.names for p in group["params"])]


class SGDMomentumTransfer(MomentumTransfer):
    """SGD: gradients arrive with their momentum in them; weight decay has momentum of its own, alike on every rank.

    By linearity: momentum of (gradient + decay) is that of both. The decay's stays in the optimizer's momentum_buffer.
    """

    def check(self, group: Group) -> None:
        _refuse(group, "dampening", "maximize")

    def read(self, group: Group) -> tuple[float, bool]:
        return float(group["momentum"]), bool(group["nesterov"])

    def notices(self) -> Iterable[str]:
        yield (
            f"the momentum of {len(self.names)} tensors moved out of the optimizer and is applied before they travel, "
            "as the optimizer's groups have it at each step; weight decay stays"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        momentum, nesterov = self.read(group)
        for parameter in owned:
            buffer = self._buffer(parameter, group["weight_decay"])
            if buffer is not None:
                decay = parameter * group["weight_decay"]
                buffer.mul_(momentum).add_(decay)
                parameter.sub_((decay.add_(buffer, alpha=momentum) if nesterov else buffer) * group["lr"])
        yield group | {"params": owned, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}

    def _buffer(self, parameter: Parameter, weight_decay: float) -> Tensor | None:
        """None where nothing ever decayed, nor had momentum before this session."""
        buffer: Tensor | None = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is None and weight_decay:
            buffer = self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return buffer


class AdamMomentumTransfer(MomentumTransfer):
    """Adam with frozen variance: p -= lr m / (sqrt(v) + eps) without bias correction, and only where v is not 0."""

    def check(self, group: Group) -> None:
        _refuse(group, "amsgrad", "maximize")
        narrow = next((p for p in group["params"] if id(p) in self.names and p.dtype == torch.float16), None)
        if narrow is not None:
            raise AttachError(
                f'"{self.names[id(narrow)]}" is float16, and so is what Adam keeps of it: squares of gradients below '
                f"0.0002 are 0 there, as is eps={group['eps']}, so that steps divide by 0, and a variance that stands "
                "still at 0 stops its parameters for good. Keep parameters in float32 and compute under "
                "torch.autocast(dtype=torch.float16), or train in bfloat16."
            )

    def read(self, group: Group) -> tuple[float, bool]:
        return float(group["betas"][0]), False

    def notices(self) -> Iterable[str]:
        yield (
            f"the momentum of {len(self.names)} tensors will move out of the optimizer and travel, and their variance "
            f"stand still, after {self.start} steps"
        )
        found = min((1 - group["betas"][1] ** self.start for group in self._owning_groups()), default=1.0)
        if found < LEAST_VARIANCE:
            yield (
                f"a warm-up of {self.start} steps finds {found:.0%} of the variance, so the frozen one makes steps "
                f"{found**-0.5:.1f} times as long: warm up for longer, or give the optimizer a smaller second beta"
            )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        for parameter in owned:
            self._move(parameter, group)
        return ()

    def _move(self, parameter: Parameter, group: Group) -> None:
        state = self.optimizer.state.get(parameter)
        if not state:
            raise LoopError(
                f'"{self.names[id(parameter)]}" has its first gradient after the warm-up, so its variance is not known '
                f"and it would never move. Warm up until every parameter was used: {self.start} steps were too few."
            )
        assert parameter.grad is not None
        lr, decay = float(group["lr"]), group["weight_decay"]
        variance, gradient = state["exp_avg_sq"], parameter.grad
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        state["exp_avg"].lerp_(gradient, 1 - group["betas"][0]).mul_(variance != 0)
        parameter.addcdiv_(state["exp_avg"], variance.sqrt().add_(group["eps"]), value=-lr)
        state["step"] += 1


SOURCES: dict[type[Optimizer], type[MomentumTransfer]] = {SGD: SGDMomentumTransfer, Adam: AdamMomentumTransfer}


def ownership(compressor: Compressor, parameters: Mapping[str, Parameter]) -> dict[str, Ownership]:
    """The parameters whose momentum the compressor applies, by name."""
    owners = {name: compressor.owns_momentum(slot_of(name, parameter)) for name, parameter in parameters.items()}
    return {name: owner for name, owner in owners.items() if owner is not None}


def take_over(
    optimizer: Optimizer,
    compressor: Compressor,
    parameters: Mapping[str, Parameter],
    at: AggregationContext,
    clip_norm: float | None,
) -> Momentum:
    """Let the compressor apply the momentum that it owns; a world of one is plain training.

    Raises AttachError where the optimizer has no such momentum, or would not work with it any more.
    """
    owned = {} if at.world == 1 else ownership(compressor, parameters)
    if not owned:
        return KeepMomentum()
    owner, *others = set(owned.values())
    if others:
        raise AttachError(
            f"{compressor!r} would take momentum from two kinds of optimizer, and there is one. Keep one of both, such "
            "as DGC(density=0.001)."
        )
    wanted = owner.optimizer.__name__
    if not isinstance(optimizer, owner.optimizer):
        raise AttachError(
            f"{compressor!r} applies the momentum of torch.optim.{wanted}, and this optimizer is a "
            f"{type(optimizer).__name__}, whose own would come on top of it. Train with "
            f"torch.optim.{wanted}(model.parameters(), ...), or send by TopK(density=0.01), which goes with all."
        )
    if clip_norm is not None:
        raise AttachError(
            f"clip_norm={clip_norm} would cut off what was sent already and has momentum in it, so that it is lost. "
            f"Leave clip_norm out and write clip={clip_norm} in {compressor!r}: each tensor's fresh gradient is then "
            "scaled down by itself, before momentum, so that means of independent ones keep within that norm for any "
            "number of workers."
        )
    first = at.rank == 0  # the user hears of it once a job
    mine = {name: parameters[name] for name in owned}
    taken = SOURCES[owner.optimizer](optimizer, mine, owner.start, warns=first)
    for line in taken.notices() if first else ():
        notice(f"{compressor!r}: {line}")
    return taken


def _refuse(group: Group, *settings: str) -> None:
    for setting in settings:
        if group[setting]:
            raise AttachError(
                f"{setting}={group[setting]} has no meaning for momentum that a compressor applies in the optimizer's "
                f"place. Leave {setting} out, or send by TopK(density=0.01)."
            )
