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
from gossamer.errors import AttachError
from gossamer.strategies import MomentRounds


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


MOMENTS = {"momentum_buffer": "first", "exp_avg": "first", "exp_avg_sq": "second"}  # by the keys of torch.optim


def averaged_keys(optimizer: Optimizer, moments: MomentRounds) -> dict[str, int]:
    """In every how many rounds the state under each key is averaged, of those that are. Raises AttachError where the
    optimizer keeps something else than the moments that have periods of their own."""
    if not moments.any:
        return {}
    keys, kind = optimizer_state_keys(optimizer), type(optimizer).__name__
    strange = [key for key in keys if key not in MOMENTS]
    if moments.named and strange:
        raise AttachError(
            f"{kind} keeps {', '.join(strange)}, and periods are known of a first and a second moment only. Use Adam, "
            'AdamW or SGD, or average everything with the parameters: optimizer_state="average".'
        )
    for moment in moments.named:
        if moment not in {MOMENTS[key] for key in keys}:
            raise AttachError(
                f"{kind} keeps no {moment} moment{_kept(keys)}, so there is nothing to average. Leave out "
                f"{moment}_moment_period."
            )
    rounds = {key: getattr(moments, MOMENTS.get(key, "others")) for key in keys}
    return {key: each for key, each in rounds.items() if each}


def _kept(keys: Sequence[str]) -> str:
    return f", but {' and '.join(keys)}" if keys else ""


def optimizer_state_keys(optimizer: Optimizer) -> list[str]:
    """Keys of the state that an optimizer of this kind and settings keeps about every entry of a parameter."""
    if any(isinstance(part, Optimizer) for value in vars(optimizer).values() for part in _items(value)):
        raise AttachError(
            f"{type(optimizer).__name__} holds other optimizers, each with a state of its own, and to find out what it "
            'keeps would make a step with them. Write optimizer_state="keep", without periods of moments.'
        )
    parameter = Parameter(torch.zeros(2, 2))
    another = copy(optimizer)  # without its hooks; a constructor may not take all that a group holds
    vars(another).update({name: value for name, value in vars(optimizer).items() if name not in vars(another)})
    another.state, another.param_groups = defaultdict(dict), [{**optimizer.param_groups[0], "params": [parameter]}]
    parameter.grad = torch.zeros(2, 2)
    another.step()
    kept = another.state[parameter].items()
    return [kind for kind, value in kept if isinstance(value, Tensor) and value.shape == parameter.shape]


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def averaged_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes sent for them: side by side all have the widest one's precision."""
    widest = max((accumulation_dtype(tensor.dtype).itemsize for tensor in tensors), default=0)
    return widest * sum(tensor.numel() for tensor in tensors)
