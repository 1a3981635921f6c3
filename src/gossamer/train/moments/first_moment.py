"""First moment: runs Adam on an averaged first moment, with a second moment defined by each rule.

Both are in the optimizer's state, where Adam keeps them: equal bits on every rank, saved with it, and unchanged in
skipped steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.errors import AttachError
from gossamer.train.moments.transfer import Group, MomentumTransfer, refuse_settings

AdamState = dict[str, Any]


class AdamRule(MomentumTransfer):
    """A rule for torch.optim.Adam and AdamW: p -= lr direction, and weight decay as theirs."""

    about = "will be computed from received values"  # about the variance, for a notice

    def check(self, group: Group) -> None:
        refuse_settings(group, "amsgrad", "maximize")
        narrow = next((p for p in group["params"] if id(p) in self.names and p.dtype == torch.float16), None)
        if narrow is not None:
            raise AttachError(
                f'"{self.names[id(narrow)]}" is float16, and so is its state in Adam: squares of gradients below '
                f"0.0002 and eps={group['eps']} are 0 in float16, so steps divide by 0, and a variance frozen at 0 "
                "stops its parameters for good. Keep parameters in float32 and compute under "
                "torch.autocast(dtype=torch.float16), or train in bfloat16."
            )

    def read(self, group: Group) -> Moments:
        return Moments(float(group["betas"][0]))

    def notices(self) -> Iterable[str]:
        yield (
            f"after {self.owner.start} steps the momentum of {len(self.names)} tensors moves from the optimizer to the "
            f"compressor, and their variance {self.about}"
        )

    def step(self, group: Group, owned: Sequence[Parameter]) -> Iterable[Group]:
        for parameter in owned:
            self._move(parameter, group)
        return ()

    def _move(self, parameter: Parameter, group: Group) -> None:
        assert parameter.grad is not None
        state: AdamState = self.optimizer.state.get(parameter) or self._begin(parameter, group)
        lr, decay, gradient = float(group["lr"]), group["weight_decay"], parameter.grad
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        state["step"] += 1
        moment, divisor = self._moments(state, gradient, group, parameter.grad)
        parameter.addcdiv_(moment, divisor, value=-lr)

    def _begin(self, parameter: Parameter, group: Group) -> AdamState:
        """The state of a parameter at its first gradient, as torch's own Adam initializes it."""
        on_device = group["capturable"] or group["fused"]
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        state: AdamState = self.optimizer.state[parameter]
        state |= {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        return state

    @abstractmethod
    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        """(first moment, divisor) of this step, counted in `state`; updates the moments there.

        received: the gradient without weight decay.
        """


def corrections(state: AdamState, group: Group) -> tuple[float, float]:
    """Adam's bias corrections of both moments."""
    first, second = group["betas"]
    steps = float(state["step"])
    return 1 - float(first) ** steps, 1 - float(second) ** steps


# -- second moments from received values -------------------------------------------------------------------------------


class MomentumVariance(AdamRule):
    """AdamS: v' = b2 m^2 + (1 - b2) g^2 with the previous moment, and p -= lr m' / (sqrt(v') + eps).

    Only m is kept. v' is stored in place of Adam's own second moment, so that Adam could continue from it.
    """

    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        variance.copy_(moment).square_().mul_(second).addcmul_(gradient, gradient, value=1 - second)
        return moment.lerp_(gradient, 1 - first), variance.sqrt().add_(group["eps"])


class AgreedVariance(AdamRule):
    """Adam with bias correction; v is unchanged where the received value is 0."""

    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        first, second = group["betas"]
        moment, variance = state["exp_avg"], state["exp_avg_sq"]
        moment.lerp_(gradient, 1 - first)
        variance.copy_(
            (variance * second).addcmul_(gradient, gradient, value=1 - second).where(received != 0, variance)
        )
        of_first, of_second = corrections(state, group)
        return moment / of_first, (variance / of_second).sqrt_().add_(group["eps"])


# -- a window of received gradients ------------------------------------------------------------------------------------


WINDOW = "window"


class WindowedMoments(AdamRule):
    """MicroAdam: m = (1 - b1) / (1 - b1^t) sum over r of b1^r g_(t-r), v the same for squares with b2.

    The optimizer's state has a ring buffer of the last gradients, (window, *shape), and the moments, from which Adam
    could continue.
    """

    arrives_with_momentum = False

    def notices(self) -> Iterable[str]:
        yield (f"the moments of {len(self.names)} tensors are those of the last {self.owner.window} received gradients")

    def read(self, group: Group) -> Moments:
        return NO_MOMENTS  # gradients are sent without momentum

    def _moments(self, state: AdamState, gradient: Tensor, group: Group, received: Tensor) -> tuple[Tensor, Tensor]:
        length, now = self.owner.window, int(state["step"]) - 1
        if WINDOW not in state:
            state[WINDOW] = gradient.new_zeros((length, *gradient.shape))
        ring, (first, second) = state[WINDOW], group["betas"]
        ring[now % length].copy_(gradient)
        moment, variance = state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        for age in reversed(range(length)):
            arrived = ring[(now - age) % length]
            moment.mul_(first).add_(arrived, alpha=1 - first)
            variance.mul_(second).addcmul_(arrived, arrived, value=1 - second)
        of_first, of_second = corrections(state, group)
        return moment / of_first, (variance / of_second).sqrt_().add_(group["eps"])
