"""Aligned moment: corrects each worker's momentum after a merge, by the difference of its steps to the mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from gossamer.errors import AttachError
from gossamer.train.moments.first_moment import corrections
from gossamer.train.moments.transfer import Group

ALIGNABLE = (Adam, SGD)


def check_alignable(optimizer: Optimizer) -> None:
    """Raise AttachError for an optimizer with momentum that is not a linear function of its steps."""
    momentum = all(group.get("momentum", 1.0) for group in optimizer.param_groups)
    if not isinstance(optimizer, ALIGNABLE) or not momentum:
        kind = "SGD without momentum" if isinstance(optimizer, SGD) else type(optimizer).__name__
        raise AttachError(
            f'optimizer_state="align" corrects the momentum of Adam, AdamW, and SGD with momentum, but this is {kind}. '
            'Leave optimizer_state out, or write optimizer_state="average".'
        )


@torch.no_grad()
def align_first_moments(optimizer: Optimizer, shifts: Mapping[Parameter, Tensor], steps: int) -> None:
    """Add the difference of the workers' mean step to this worker's own step to each first moment.

    m <- m + s / (lr steps) (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps)   Adam, AdamW
    b <- b + s / (lr steps)                                                 SGD with momentum

    Args:
        optimizer: Adam, AdamW or SGD; its current learning rate is used for all these steps.
        shifts: s by parameter, in the parameter's unit and shape: (agreed - mean of x_i) - (agreed - x_i), or the same
            with the decompressed mean. Positive entries: the other workers moved further downhill.
        steps: number of local steps that caused these differences, 1 or more.

    Parameters without a step so far, and those with learning rate 0, are left out.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, shift in shifts.items():
        group, state = groups.get(id(parameter)), optimizer.state.get(parameter)
        rate = float(group["lr"]) if group is not None else 0.0
        if group is None or not state or not rate:
            continue
        for moment, scale in _moments(state, group):
            moment.add_((shift / (rate * steps) * scale).to(moment.dtype))


def _moments(state: Mapping[str, Tensor], group: Group) -> Iterable[tuple[Tensor, Tensor | float]]:
    """First moments, and the factor from a step per learning rate to each."""
    if state.get("momentum_buffer") is not None:
        yield state["momentum_buffer"], 1.0
    if "exp_avg" in state and float(state["step"]):  # 0 if a fused optimizer has skipped all steps so far
        of_first, of_second = corrections(dict(state), group)
        second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
        yield state["exp_avg"], (second / of_second).sqrt().add_(group["eps"]).mul_(of_first)
