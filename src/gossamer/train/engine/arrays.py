"""Arrays: gradients passed in by the loop as a source of gradients, and conversion between arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gossamer.base.layout import dtype_name
from gossamer.errors import AttachError, LayoutError
from gossamer.train.engine.autograd_hooks import LoopControls

Array = Any  # a numpy array, a torch tensor, or another array with __dlpack__


class _Watch:
    """A watch of given gradients: the callbacks of a backward pass."""

    def __init__(
        self,
        source: GivenGradients,
        parameters: Mapping[str, Tensor],
        over: Callable[[], None],
        began: Callable[[], None] | None,
        ready: Callable[[str, Tensor], None] | None,
        controls: LoopControls | None,
    ) -> None:
        self._source, self.parameters, self.over, self.began, self.ready = source, parameters, over, began, ready
        self.controls = controls or LoopControls()

    def close(self) -> None:
        self._source.watches = [each for each in self._source.watches if each is not self]


class GivenGradients:
    """A source of gradients that the loop passes in, all at once, as one backward pass."""

    def __init__(self) -> None:
        self.watches: list[_Watch] = []

    def watch(
        self,
        parameters: Mapping[str, Tensor],
        over: Callable[[], None],
        began: Callable[[], None] | None = None,
        ready: Callable[[str, Tensor], None] | None = None,
        controls: LoopControls | None = None,
    ) -> _Watch:
        self.watches.append(_Watch(self, parameters, over, began, ready, controls))
        return self.watches[-1]

    @torch.no_grad()
    def give(self, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Add `gradients` to those of `tensors`, as autograd does, and call all watches."""
        watches = [each for each in self.watches if not each.controls.muted]
        for watch in watches:
            if watch.began is not None:
                watch.began()
        for name in reversed([*tensors]):  # as backward passes, which reach the last parameters first
            tensor, gradient = tensors[name], gradients[name]
            if tensor.grad is None:
                tensor.grad = gradient.clone()  # the caller or a recipe may write to it later
            else:
                tensor.grad.add_(gradient)
            for watch in watches:
                if watch.ready is not None and name in watch.parameters:
                    watch.ready(name, tensor)
        for watch in watches:
            watch.over()


def leaf(name: str, array: Array) -> Tensor:
    """A tensor of the session that holds one parameter."""
    tensor = as_tensor(array).clone()
    if not tensor.is_floating_point():
        raise AttachError(
            f'"{name}" has dtype {dtype_name(tensor.dtype)}, but only floating-point tensors are averaged. Leave it '
            "out of the session's parameters."
        )
    return tensor


def as_tensor(array: Array) -> Tensor:
    """An array as a tensor, sharing its memory if possible."""
    if isinstance(array, Tensor):
        return array.detach()
    if isinstance(array, np.generic):  # the result of arithmetic with an array of no dimensions
        array = np.asarray(array)
    if isinstance(array, np.ndarray):
        own = array if array.flags.writeable and array.flags.c_contiguous else array.copy()
        if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # of ml_dtypes; torch does not know it
            return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(own)
    if hasattr(array, "__dlpack__"):
        with suppress(BufferError):  # read-only memory
            return from_dlpack(array)
        return torch.from_numpy(np.array(array))
    raise LayoutError(
        f"{type(array).__name__} is not a numpy array, torch tensor or array with __dlpack__. Write "
        "numpy.asarray(value, dtype) around it."
    )


def like(array: Array, tensor: Tensor | None) -> Array:
    """A copy of a tensor as an array of the kind of `array`."""
    assert tensor is not None
    copy = tensor.detach().clone()
    if isinstance(array, np.ndarray | np.generic):
        return as_numpy(copy.cpu(), array.dtype)
    if not isinstance(array, Tensor) and hasattr(array, "__array_namespace__"):
        return array.__array_namespace__().from_dlpack(copy)
    return copy


def kind_of(array: Array) -> Array:
    """A placeholder for `array` in calls of `like`, without its memory if possible."""
    if isinstance(array, Tensor):
        return array.new_empty(0)
    return np.empty(0, array.dtype) if isinstance(array, np.ndarray | np.generic) else array


def as_numpy(tensor: Tensor, dtype: Any) -> Any:
    """A CPU tensor as an array of `dtype` in the same memory; bfloat16 of numpy comes from ml_dtypes."""
    return tensor.view(torch.int16).numpy().view(dtype) if tensor.dtype is torch.bfloat16 else tensor.numpy()
