"""Local state: state dicts of a model or an optimizer with this rank's shards in place of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import CheckpointError
from gossamer.train.sharding.local_shards import like, local_part


class LocalModelState:
    """The state of a sharded model, as this rank's part of each tensor."""

    def __init__(self, model: nn.Module, before: Callable[[], None]) -> None:
        """before: called before the model is read or written."""
        self._model, self._before = model, before

    def state_dict(self) -> dict[str, Any]:
        self._before()
        return {name: _local(value) for name, value in self._model.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._before()
        own = self._model.state_dict()
        if own.keys() != state_dict.keys():
            raise CheckpointError(
                f"this checkpoint and the model have different entries: {sorted(own.keys() ^ state_dict.keys())}. "
                "Build the model as in the run that wrote it, or begin in an empty directory."
            )
        for name, value in state_dict.items():
            if isinstance(value, Tensor):
                local_part(own[name]).copy_(value)


class LocalOptimizerState:
    """The state of an optimizer of sharded parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        kept = {place: {key: _local(value) for key, value in about.items()} for place, about in state["state"].items()}
        return {**state, "state": kept}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        kept = {
            place: {key: _as_sharded(key, value, parameters[place]) for key, value in about.items()}
            for place, about in state_dict["state"].items()
        }
        self._optimizer.load_state_dict({**state_dict, "state": kept})


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _as_sharded(key: str, value: Any, parameter: Tensor) -> Any:
    """Convert state of the parameter's local shape to its sharding; a count of steps is unchanged."""
    if key == "step" or not isinstance(value, Tensor) or value.shape != local_part(parameter).shape:
        return value
    return like(value, parameter)
