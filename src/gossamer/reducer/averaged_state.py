"""Uncompressed state averaged with the parameters: BatchNorm's statistics and, where asked, an optimizer's momenta."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.core.layout import accumulation_dtype


@dataclass(frozen=True)
class AveragedState:
    """Floating-point tensors, of the same shapes on every worker."""

    tensors: Sequence[Tensor] = ()

    def numbers(self) -> Tensor | None:
        """A copy of all of them, in float32 or wider: (n,); None where there are none."""
        if not self.tensors:
            return None
        return torch.cat([tensor.detach().reshape(-1).to(accumulation_dtype(tensor.dtype)) for tensor in self.tensors])

    def replace(self, mean: Tensor, kept_share: float) -> None:
        """Overwrite them with `mean`, but for the share that is kept."""
        parts = mean.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            new = part.view(tensor.shape)
            tensor.copy_(torch.lerp(new, tensor.to(new.dtype), kept_share) if kept_share else new)


def optimizer_state_tensors(
    optimizer: Optimizer, parameters: Sequence[Parameter], kinds: Sequence[str]
) -> list[Tensor]:
    """An optimizer's state about parameters, entry by entry; zeros where it has not made a step with one yet, since all
    workers send as many numbers."""
    kept = [optimizer.state.get(parameter, {}).get(kind) for parameter in parameters for kind in kinds]
    blank = [parameter for parameter in parameters for _ in kinds]
    return [torch.zeros_like(p) if value is None else value for value, p in zip(kept, blank, strict=True)]


def optimizer_state_keys(optimizer: Optimizer) -> list[str]:
    """Keys of the state that an optimizer of this kind and settings keeps about every entry of a parameter."""
    parameter = Parameter(torch.zeros(2, 2))
    another = copy(optimizer)  # without its hooks; a constructor may not take all that a group holds
    vars(another).update({name: value for name, value in vars(optimizer).items() if name not in vars(another)})
    another.state, another.param_groups = defaultdict(dict), [{**optimizer.param_groups[0], "params": [parameter]}]
    parameter.grad = torch.zeros(2, 2)
    another.step()
    kept = another.state[parameter].items()
    return [kind for kind, value in kept if isinstance(value, Tensor) and value.shape == parameter.shape]


def averaged_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes sent for them: side by side all have the widest one's precision."""
    widest = max((accumulation_dtype(tensor.dtype).itemsize for tensor in tensors), default=0)
    return widest * sum(tensor.numel() for tensor in tensors)
