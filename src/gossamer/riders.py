"""What is averaged along with parameters as it is: BatchNorm's statistics, and an optimizer's momenta where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


@dataclass(frozen=True)
class Riders:
    """Floating-point tensors that every worker has alike."""

    tensors: Sequence[Tensor] = ()

    def numbers(self) -> Tensor | None:
        """A copy of all of them, in float32 or wider: (n,); None where there are none."""
        if not self.tensors:
            return None
        flat = [
            tensor.detach().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in self.tensors
        ]
        return torch.cat(flat)

    def replace(self, mean: Tensor, kept_share: float) -> None:
        """Overwrite them with `mean`, but for the share that is kept."""
        parts = mean.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            new = part.view(tensor.shape)
            tensor.copy_(torch.lerp(new, tensor.to(new.dtype), kept_share) if kept_share else new)


def momenta(optimizer: Optimizer, parameters: Sequence[Parameter]) -> list[Tensor]:
    """What an optimizer keeps about parameters, entry by entry."""
    return [
        value
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point() and value.ndim
    ]


def momenta_kept(optimizer: Optimizer) -> int:
    """How many tensors an optimizer of this kind and settings keeps for each parameter."""
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key in optimizer.defaults}
    parameter = Parameter(torch.zeros(2, 2))
    another = type(optimizer)([parameter], **settings)
    parameter.grad = torch.zeros(2, 2)
    another.step()
    return len(momenta(another, [parameter]))


def numbers_bytes(tensor: Tensor) -> int:
    """Of one that travels along."""
    return tensor.numel() * _wide(tensor.dtype).itemsize


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
