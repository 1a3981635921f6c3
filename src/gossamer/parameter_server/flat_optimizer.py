"""A torch optimizer on flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.core.layout import FlatTensors
from gossamer.parameter_server.shard_spec import Options, ShardSpec


class FlatOptimizer:
    """The workers' optimizer, made again: it steps whole blocks, which an elementwise rule does not notice."""

    def __init__(self, description: ShardSpec, blocks: Sequence[FlatTensors]) -> None:
        self._parameters = [Parameter(block.flat) for block in blocks]
        self._groups = [block.group for block in description.blocks]
        kind: Callable[..., Optimizer] = getattr(torch.optim, description.optimizer)
        given = [_given(kind, group) for group in description.groups]
        self._optimizer = kind(
            [
                {"params": [parameter], **given[group]}
                for parameter, group in zip(self._parameters, self._groups, strict=True)
            ],
            **_arguments(kind, given[0]),  # Adagrad begins its sums with what it is given here, not in the groups
        )

    def step(self, gradients: Sequence[Tensor], options: Sequence[Options], rate: float = 1.0) -> None:
        """One step by the groups' hyperparameters `options`, with their learning rates times `rate`."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in options[number].items() if name in group})
            group["lr"] = group["lr"] * rate if rate != 1.0 else group["lr"]
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _arguments(kind: Callable[..., Optimizer], options: Options) -> Options:
    """Those that its constructor takes: AdamW has a default that is none."""
    return {name: value for name, value in options.items() if name in signature(kind).parameters}


def _given(kind: Callable[..., Optimizer], options: Options) -> Options:
    """Those that the class knows: schedulers leave others in the groups."""
    known = kind([Parameter(torch.zeros(1))], lr=0.0).defaults
    return {name: value for name, value in options.items() if name in known}
