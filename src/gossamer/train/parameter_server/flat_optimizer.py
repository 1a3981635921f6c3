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
from gossamer.train.parameter_server.shard_spec import Options, ShardSpec, optimizer_class


class FlatOptimizer:
    """The workers' optimizer, rebuilt on whole blocks. For an elementwise rule the result is the same.

    velocities: by block, whether gradients include SGD's momentum. Weight decay stays in the optimizer with its own
    momentum, and both are added, since SGD is linear.
    """

    def __init__(self, spec: ShardSpec, blocks: Sequence[FlatTensors], velocities: Sequence[bool]) -> None:
        self._velocities = velocities
        self._parameters = [Parameter(block.flat) for block in blocks]
        self._groups = [block.group for block in spec.blocks]
        kind = optimizer_class(spec.optimizer)
        given = [_given(kind, group) for group in spec.groups]
        self._optimizer = kind(
            [
                {"params": [parameter], **given[group]}
                for parameter, group in zip(self._parameters, self._groups, strict=True)
            ],
            **_arguments(kind, given[0]),  # Adagrad takes its initial sums from these, not from the groups
        )

    def step(self, gradients: Sequence[Tensor | None], options: Sequence[Options], lr_factor: float = 1.0) -> None:
        """Make one step with the groups' hyperparameters `options`, with learning rates multiplied by `lr_factor`.

        A delayed momentum has a share instead, which multiplies the gradients. Blocks without a gradient do not change.
        """
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in options[number].items() if name in group})
            scaled = "share" if "share" in group else "lr"
            group[scaled] = group[scaled] * lr_factor if lr_factor != 1.0 else group[scaled]
        for parameter, gradient, group, ready in self._with_groups(gradients):
            if gradient is not None:
                parameter.grad = self._decay_only(parameter, group) if ready else gradient.to(parameter.dtype)
        self._optimizer.step()
        for parameter, gradient, group, ready in self._with_groups(gradients):
            parameter.grad = None
            if ready and gradient is not None:
                parameter.detach().sub_(gradient.to(parameter.dtype), alpha=group["lr"])

    def _with_groups(
        self, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[Parameter, Tensor | None, dict[str, Any], bool]]:
        return zip(self._parameters, gradients, self._optimizer.param_groups, self._velocities, strict=True)

    def _decay_only(self, parameter: Parameter, group: dict[str, Any]) -> Tensor | None:
        """A gradient of zeros; None if there is no weight decay, now or before."""
        decays = group.get("weight_decay") or parameter in self._optimizer.state
        return torch.zeros_like(parameter) if decays else None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _arguments(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options that are constructor arguments; AdamW has a default that is not."""
    return {name: value for name, value in options.items() if name in signature(kind).parameters}


def _given(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options of the optimizer class; schedulers add others to the groups."""
    known = kind([Parameter(torch.zeros(1))], lr=0.0).defaults
    return {name: value for name, value in options.items() if name in known}
