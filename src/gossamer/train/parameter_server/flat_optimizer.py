"""Flat optimizer: a torch optimizer that steps a shard's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.base.layout import FlatTensors
from gossamer.train.parameter_server.shard_spec import Options, ShardSpec


class FlatOptimizer:
    """The workers' optimizer, rebuilt on whole blocks: for an elementwise rule the result is the same.

    velocities: by block, whether gradients come with SGD's momentum in them; by linearity that of weight decay, which
    stays in the optimizer, is applied beside it.
    """

    def __init__(self, spec: ShardSpec, blocks: Sequence[FlatTensors], velocities: Sequence[bool]) -> None:
        self._velocities = velocities
        self._parameters = [Parameter(block.flat) for block in blocks]
        self._groups = [block.group for block in spec.blocks]
        kind: Callable[..., Optimizer] = getattr(torch.optim, spec.optimizer)
        given = [_given(kind, group) for group in spec.groups]
        self._optimizer = kind(
            [
                {"params": [parameter], **given[group]}
                for parameter, group in zip(self._parameters, self._groups, strict=True)
            ],
            **_arguments(kind, given[0]),  # Adagrad begins its sums with what it is given here, not in the groups
        )

    def step(self, gradients: Sequence[Tensor], options: Sequence[Options], lr_factor: float = 1.0) -> None:
        """One step with the groups' hyperparameters `options`, their learning rates times `lr_factor`."""
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in options[number].items() if name in group})
            group["lr"] = group["lr"] * lr_factor if lr_factor != 1.0 else group["lr"]
        for parameter, gradient, group, ready in self._with_groups(gradients):
            parameter.grad = self._decay_only(parameter, group) if ready else gradient.to(parameter.dtype)
        self._optimizer.step()
        for parameter, gradient, group, ready in self._with_groups(gradients):
            parameter.grad = None
            if ready:
                parameter.detach().sub_(gradient.to(parameter.dtype), alpha=group["lr"])

    def _with_groups(self, gradients: Sequence[Tensor]) -> Iterator[tuple[Parameter, Tensor, dict[str, Any], bool]]:
        return zip(self._parameters, gradients, self._optimizer.param_groups, self._velocities, strict=True)

    def _decay_only(self, parameter: Parameter, group: dict[str, Any]) -> Tensor | None:
        """A gradient of zeros; none where nothing decays or ever did."""
        decays = group.get("weight_decay") or parameter in self._optimizer.state
        return torch.zeros_like(parameter) if decays else None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _arguments(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options that the constructor takes: AdamW has a default that is no argument."""
    return {name: value for name, value in options.items() if name in signature(kind).parameters}


def _given(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options that the class knows: schedulers leave others in the groups."""
    known = kind([Parameter(torch.zeros(1))], lr=0.0).defaults
    return {name: value for name, value in options.items() if name in known}
