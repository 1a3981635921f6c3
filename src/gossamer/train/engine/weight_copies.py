"""Weight copies: copies of parameters that an optimizer keeps, such as fp32 masters of bf16 parameters.

Such an optimizer computes its step on the copy and overwrites the parameter. Any other write to the parameter, such as
an average over workers, must update the copy as well; otherwise the next step() undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.base.layout import accumulation_dtype

NEAR = 0.5  # maximum distance of a copy to its parameter, relative to its norm; moments are mostly farther away
# Keys of moments in torch.optim. Momentum with weight decay tends to weight_decay / (1 - momentum) of its parameter.
ADAM = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"})
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch.optim: one number for each parameter
MOMENTS = ADAM | {"momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"}
DEEPEST = 3  # nesting depth of optimizers and of lists that are searched


class _Copy(NamedTuple):
    """A copy, read again on each use: an optimizer may replace the tensor at each step, and its state when loading."""

    parameter: Tensor
    read: Callable[[], object]

    @property
    def tensor(self) -> Tensor | None:
        found = self.read()
        return found if _fits(found, self.parameter) else None


class WeightCopies:
    """Copies of parameters in an optimizer and optimizers within it: in their state, or in lists of their own.

    They are searched before the first write to a parameter, when the optimizer has state; and again once it has state
    of more parameters, such as those that had no gradient before.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        self._found: Mapping[int, Sequence[_Copy]] | None = None  # by id of the parameter
        self._searched = 0  # what `_size` was then

    @contextmanager
    def following(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context manager around writes to `parameters`, which updates their copies by the same change.

        A copy m of a parameter x becomes m + (x' - x), or x' if that does not round to x'. The part of m beyond the
        precision of x is kept, so that steps smaller than a rounding error accumulate.
        """
        if self._found is None or self._searched != self._size():
            self._found, self._searched = self._look(), self._size()
        copies = (
            [copy for parameter in parameters for copy in self._found.get(id(parameter), ())] if self._found else []
        )
        before = [copy.parameter.detach().clone() for copy in copies]
        yield
        with torch.no_grad():
            for copy, old in zip(copies, before, strict=True):
                if (tensor := copy.tensor) is not None:
                    _move(tensor.detach(), old, copy.parameter.detach())

    def _size(self) -> int:
        """Number of the parameters in the optimizers' groups and in their state."""
        optimizers = [*_nested(self._optimizers)]
        held = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        return held + sum(len(optimizer.state) for optimizer in optimizers)

    def _look(self) -> Mapping[int, Sequence[_Copy]] | None:
        """Search for copies; None if no optimizer has made a step yet."""
        optimizers = [*_nested(self._optimizers)]
        if not any(optimizer.state for optimizer in optimizers):
            return None if optimizers else {}
        found: dict[int, list[_Copy]] = {}
        for group in (group for optimizer in optimizers for group in _candidates(optimizer)):
            if _near(group):
                for copy in group:
                    found.setdefault(id(copy.parameter), []).append(copy)
        return found


def _nested(optimizers: Iterable[Optimizer], depth: int = DEEPEST) -> Iterator[Optimizer]:
    """All optimizers, including nested ones."""
    for optimizer in optimizers:
        yield optimizer
        if depth:
            within = [each for value in vars(optimizer).values() for each in items(value)]
            yield from _nested([each for each in within if isinstance(each, Optimizer)], depth - 1)


def items(value: object) -> Sequence[object]:
    """The items of a list or tuple; any other value alone."""
    return value if isinstance(value, list | tuple) else [value]


def _candidates(optimizer: Optimizer) -> Iterator[list[_Copy]]:
    """Tensors with the parameters' shapes, grouped by key in the state or by list; a group is copies or not."""
    by_key: dict[object, list[_Copy]] = {}
    others = {*MOMENTS, *SCALARS}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(parameter, Tensor) and isinstance(state, dict) else ():
            if key not in others and _fits(value, parameter):
                by_key.setdefault(key, []).append(_Copy(parameter, partial(_read, optimizer, parameter, key)))
            elif isinstance(value, Tensor) and value.shape != parameter.shape:
                others.add(key)
    yield from (copies for key, copies in by_key.items() if key not in others)
    groups = [group["params"] for group in optimizer.param_groups]
    for parameters in groups if len(groups) == 1 else [*groups, list(chain.from_iterable(groups))]:
        for values in _lists(
            [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
        ):
            pairs = zip(values, parameters, strict=False)
            if len(values) == len(parameters) and all(_fits(value, parameter) for value, parameter in pairs):
                yield [_Copy(each, partial(values.__getitem__, place)) for place, each in enumerate(parameters)]


def _read(optimizer: Optimizer, parameter: Tensor, key: object) -> object:
    return optimizer.state.get(parameter, {}).get(key)


def _lists(value: object, depth: int = DEEPEST) -> Iterator[list[Any]]:
    if isinstance(value, list | tuple) and depth >= 0:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            yield value
        for each in value:
            yield from _lists(each, depth - 1)


def _fits(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value is parameter or not value.is_floating_point():
        return False
    apart = value.data_ptr() != parameter.data_ptr()  # a tensor that shares the parameter's memory needs no update
    return value.shape == parameter.shape and value.device == parameter.device and apart


def _near(group: Sequence[_Copy]) -> bool:
    """Whether these are copies, that is, close to their parameters in total. Synchronizes with the device."""
    away, norm = [], []
    for copy in group:
        value, parameter = copy.tensor, copy.parameter.detach()
        assert value is not None
        dtype = accumulation_dtype(torch.promote_types(value.dtype, parameter.dtype))
        away.append(torch.linalg.vector_norm(value.detach().to(dtype) - parameter.to(dtype)).double().cpu())
        norm.append(torch.linalg.vector_norm(parameter.to(dtype)).double().cpu())
    return bool(torch.stack(away).norm() < NEAR * torch.stack(norm).norm())


def _move(copy: Tensor, old: Tensor, new: Tensor) -> None:
    before, after = old.to(copy.dtype), new.to(copy.dtype)
    moved = torch.where(copy == before, after, copy + (after - before))
    if copy.dtype != new.dtype:
        moved = torch.where(moved.to(new.dtype) == new, moved, after)
    copy.copy_(moved)
