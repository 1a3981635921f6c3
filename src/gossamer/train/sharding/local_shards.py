"""Local shards: make this rank's part of each DTensor a separate parameter, and move gradients between both.

With FSDP2 and tensor parallelism, the parameters of a model are DTensors: each rank holds a local tensor. Synchronizers
average a leaf that shares the memory of that tensor. After a backward pass of the model, the gradients are in the
DTensors; a second, trivial backward pass assigns their local tensors to these leaves, which triggers the leaves'
gradient hooks. The leaves' resulting gradients are assigned to the DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.errors import CheckpointError, LayoutError
from gossamer.train.checkpoint.state import OptimizerState
from gossamer.train.engine.autograd_hooks import BackwardMonitor
from gossamer.train.engine.extension import Extension, GradientUse
from gossamer.train.engine.parameter_views import trainable


class WholeParameters:
    """Trainable parameters that are on one rank each, and are averaged directly.

    parameters: by name, as seen by synchronizers; own: as held by the model and the optimizer.
    """

    sharded = False

    def __init__(self, own: Mapping[str, Parameter]) -> None:
        self.own = dict(own)
        self.parameters = self.own

    def gather(self) -> None:
        """Called before and after parameters are written: drop gathered copies."""

    def close(self) -> None:
        """Remove hooks from the model."""


class LocalShards(WholeParameters, Extension):
    """The local tensors of a model's trainable parameters, some of which are DTensors."""

    order, sharded = -1, True

    def __init__(self, model: nn.Module, own: Mapping[str, Parameter]) -> None:
        self._model = model
        self.own = dict(own)
        self.parameters = {name: _leaf(parameter) for name, parameter in own.items()}
        self._monitor = BackwardMonitor(self.own, self._pass_over)

    def _pass_over(self) -> None:
        fresh = self._take()
        if fresh:
            torch.autograd.backward([leaf for leaf, _ in fresh], [gradient for _, gradient in fresh])
        self.show()

    def before_exchange(self, steps: int) -> None:
        """Read gradients that the loop may have changed."""
        for leaf, gradient in self._take(held=False):
            leaf.grad = gradient

    def _take(self, *, held: bool = True) -> list[tuple[Parameter, Tensor]]:
        """(leaf, new part of its gradient). held: include zeros for gradients that the pass accumulated in place."""
        fresh: list[tuple[Parameter, Tensor]] = []
        for name, parameter in self.own.items():
            leaf, gradient = self.parameters[name], _local_gradient(parameter)
            _refuse_moved(name, leaf, parameter)
            if gradient is not None and leaf.grad is not None and _same_memory(leaf.grad, gradient):
                if held:
                    fresh.append((leaf, torch.zeros_like(gradient)))
                continue
            leaf.grad = None
            if gradient is not None:
                fresh.append((leaf, gradient))
        return fresh

    def before_step(self, use: GradientUse) -> None:
        if use.attached:
            self.show()

    @torch.no_grad()
    def show(self) -> None:
        """Assign the leaves' gradients to the model's parameters."""
        for name, parameter in self.own.items():
            gradient = self.parameters[name].grad
            parameter.grad = None if gradient is None else like(gradient, parameter)

    def gather(self) -> None:
        for module in self._model.modules():
            reshard = getattr(module, "reshard", None)  # of FSDP2's modules: for their own parameters only
            if callable(reshard):
                reshard()

    def close(self) -> None:
        self._monitor.close()


def parameters_of(model: nn.Module) -> WholeParameters:
    """The trainable parameters of a model, or this rank's shards of them."""
    own = trainable(model)
    return LocalShards(model, own) if sharded_parameters(model) else WholeParameters(own)


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """Trainable parameters that are DTensors, by name."""
    return {name: parameter for name, parameter in trainable(model).items() if is_sharded(parameter)}


def is_sharded(tensor: Tensor | None) -> TypeGuard[Any]:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes half a second; not imported, no DTensor
    kind = getattr(module, "DTensor", None)  # another thread may be importing it
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    with torch.no_grad():  # otherwise a DTensor returns a view with autograd history
        part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part.detach()


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_part(tensor) for tensor in tensors]


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A local part in the form of `tensor`: a DTensor of the same mesh and placements, or unchanged."""
    if not is_sharded(tensor):
        return part
    whole: Any = tensor
    made: Tensor = type(whole.data).from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def _leaf(parameter: Parameter) -> Parameter:
    """A leaf with the memory and version counter of the local tensor; nn.Parameter would create another counter."""
    return cast(Parameter, local_part(parameter).requires_grad_())


@torch.no_grad()
def _local_gradient(parameter: Parameter) -> Tensor | None:
    """The local gradient, after pending sums of tensor parallelism: a collective of its mesh, on all of its ranks."""
    gradient, whole = parameter.grad, cast(Any, parameter)
    if not is_sharded(gradient):
        return gradient
    summed: Tensor = gradient.redistribute(placements=whole.placements).to_local()
    return summed


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _refuse_moved(name: str, leaf: Tensor, parameter: Parameter) -> None:
    now = local_part(parameter)
    if not _same_memory(leaf, now) or leaf.dtype != now.dtype:
        raise LayoutError(
            f'the shard of "{name}" has other memory than at attach, for example after model.to(...) or '
            "load_state_dict(..., assign=True), so averages would not reach it. Call session.close() before and "
            "gossamer.attach(...) after it."
        )


# -- state dicts of local shards, for checkpoints ----------------------------------------------------------------------


EXTRA_STATE = "_extra_state"  # torch's key for the state of a module with set_extra_state


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
        extra = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] == EXTRA_STATE}
        for name, value in state_dict.items():
            if isinstance(value, Tensor) and name not in extra:
                local_part(own[name]).copy_(value)
        if extra:
            self._model.load_state_dict(extra, strict=False)


class LocalOptimizerState(OptimizerState):
    """The state of an optimizer of sharded parameters."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        kept = {place: {key: _local(value) for key, value in about.items()} for place, about in state["state"].items()}
        return {**state, "state": kept}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        kept = {
            place: {key: _as_sharded(key, value, parameters[place]) for key, value in about.items()}
            for place, about in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": kept})


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _as_sharded(key: str, value: Any, parameter: Tensor) -> Any:
    """Convert state of the parameter's local shape to its sharding; a count of steps is unchanged."""
    if key == "step" or not isinstance(value, Tensor) or value.shape != local_part(parameter).shape:
        return value
    return like(value, parameter)
