"""Uncompressed state averaged with the parameters: BatchNorm statistics and, if requested, optimizer moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.strategies import MomentRounds
from gossamer.base.layout import accumulation_dtype
from gossamer.base.torch_hooks import OPTIMIZER_STEP, OPTIMIZER_STEPPED
from gossamer.errors import AttachError
from gossamer.train.engine.model_buffers import is_counter
from gossamer.train.engine.weight_copies import items


@dataclass(frozen=True)
class AveragedState:
    """Tensors of equal shapes on every worker: floating-point tensors, or single integers.

    names: names of the first tensors, which belong to the model; the others belong to an optimizer.
    """

    tensors: Sequence[Tensor] = ()
    names: Sequence[str] = ()

    @classmethod
    def of(cls, named: Mapping[str, Tensor], others: Iterable[Tensor] = ()) -> AveragedState:
        return cls([*named.values(), *others], list(named))

    def numbers(self) -> Tensor | None:
        """A copy of all values, in float32 or wider: (n,); None without tensors."""
        if not self.tensors:
            return None
        return torch.cat([tensor.detach().reshape(-1).to(accumulation_dtype(tensor.dtype)) for tensor in self.tensors])

    def replace(self, mean: Tensor, kept_share: float, sent: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Overwrite the tensors with `mean`; integers are rounded.

        Args:
            mean: (n,), as `numbers` returns them.
            kept_share: share of the old value in the new one, in [0, 1].
            sent: values of some tensors when they were sent, some steps ago. These become `mean` plus their change
                since then.
        """
        names = [*self.names, *[""] * (len(self.tensors) - len(self.names))]
        for name, tensor, new in zip(names, self.tensors, self._parts(mean), strict=True):
            if name in sent:
                new = new + (tensor - sent[name])
            elif kept_share:
                new = torch.lerp(new, tensor.to(new.dtype), kept_share)
            tensor.detach().copy_(new if tensor.is_floating_point() else new.round())

    def named(self, mean: Tensor) -> dict[str, Tensor]:
        """`mean` by name, for the tensors that belong to the model, in their dtypes."""
        rows = zip(self.names, self.tensors, self._parts(mean), strict=False)
        return {name: (new if old.is_floating_point() else new.round()).to(old.dtype) for name, old, new in rows}

    def held(self) -> dict[str, Tensor]:
        """A copy by name of the tensors that belong to the model."""
        return {name: tensor.detach().clone() for name, tensor in zip(self.names, self.tensors, strict=False)}

    def counted_on(self) -> dict[str, Tensor]:
        """A copy of tensors that accumulate each worker's own steps: counters, and frozen parameters that change."""
        named = zip(self.names, self.tensors, strict=False)
        return {name: each.detach().clone() for name, each in named if isinstance(each, Parameter) or is_counter(each)}

    def _parts(self, mean: Tensor) -> list[Tensor]:
        parts = mean.split([tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape) for tensor, part in zip(self.tensors, parts, strict=True)]


def optimizer_state_tensors(
    optimizer: Optimizer, parameters: Sequence[Parameter], kinds: Sequence[str]
) -> list[Tensor]:
    """An optimizer's state tensors of parameters; zeros for parameters without state yet, since all workers send the
    same number of values."""
    kept = [optimizer.state.get(parameter, {}).get(kind) for parameter in parameters for kind in kinds]
    blank = [parameter for parameter in parameters for _ in kinds]
    return [torch.zeros_like(p) if value is None else value for value, p in zip(kept, blank, strict=True)]


MOMENTS = {"momentum_buffer": "first", "exp_avg": "first", "exp_avg_sq": "second"}  # by the keys of torch.optim


def averaged_keys(optimizer: Optimizer, moments: MomentRounds) -> dict[str, int]:
    """Number of rounds between two averages of the state under each key. Raises AttachError if the optimizer keeps
    other state than the moments with periods of their own."""
    if not moments.any:
        return {}
    keys, kind = optimizer_state_keys(optimizer), type(optimizer).__name__
    strange = [key for key in keys if key not in MOMENTS]
    if moments.named and strange:
        raise AttachError(
            f"{kind} keeps {', '.join(strange)}, but periods exist only for first and second moments. Use Adam, AdamW "
            'or SGD, or average everything with the parameters: optimizer_state="average".'
        )
    for moment in moments.named:
        if moment not in {MOMENTS[key] for key in keys}:
            raise AttachError(
                f"{kind} keeps no {moment} moment{_kept(keys)}, so there is nothing to average. Leave out "
                f"{moment}_moment{'' if moments.shared_divisor and moment == 'second' else '_period'}."
            )
    rounds = {key: getattr(moments, MOMENTS.get(key, "others")) for key in keys}
    return {key: each for key, each in rounds.items() if each}


def _kept(keys: Sequence[str]) -> str:
    return f", but {' and '.join(keys)}" if keys else ""


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy without parameters, state, hooks and wrapped methods; the constructor may not accept all entries of
    a group. A scheduler replaces `step` on the instance, and that one makes the step of `optimizer`."""
    made = copy(optimizer)  # without its hooks
    plain = {name: each for name, each in vars(optimizer).items() if not callable(getattr(type(optimizer), name, None))}
    vars(made).update(plain | vars(made))
    made.state, made.param_groups = defaultdict(dict), []
    return made


def optimizer_state_keys(optimizer: Optimizer) -> list[str]:
    """Keys of the state that an optimizer of this kind and settings keeps for every entry of some parameter."""
    if any(isinstance(part, Optimizer) for value in vars(optimizer).values() for part in items(value)):
        raise AttachError(
            f"{type(optimizer).__name__} holds other optimizers, each with its own state, and determining their state "
            'would require a step with them. Write optimizer_state="keep", without periods of moments.'
        )
    another = bare_copy(optimizer)
    parameters = [Parameter(torch.zeros(2, 2)) for _ in optimizer.param_groups]  # groups may keep different state
    groups = zip(optimizer.param_groups, parameters, strict=True)
    another.param_groups = [{**group, "params": [each]} for group, each in groups]
    for each in parameters:
        each.grad = torch.zeros(2, 2)
    with OPTIMIZER_STEP.unheard(), OPTIMIZER_STEPPED.unheard():  # open sessions would take it for a step of the loop
        try:
            another.step()
        except Exception as error:
            raise AttachError(
                f"the state of {type(optimizer).__name__} is found by a step on gradients of zeros, which failed "
                f'({type(error).__name__}: {error}). Write optimizer_state="keep", without periods of moments.'
            ) from error
    kept = [item for each in parameters for item in another.state[each].items()]
    like = [kind for kind, value in kept if isinstance(value, Tensor) and value.shape == parameters[0].shape]
    return list(dict.fromkeys(like))


def averaged_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes sent for these tensors: all are converted to the widest precision."""
    widest = max((accumulation_dtype(tensor.dtype).itemsize for tensor in tensors), default=0)
    return widest * sum(tensor.numel() for tensor in tensors)
