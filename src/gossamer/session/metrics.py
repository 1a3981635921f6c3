"""Metrics over all workers: gossamer.mean and gossamer.gather for numbers, texts and small tensors, with or without a
session. They travel as JSON and as bytes of tensors; nothing is unpickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from math import isfinite, prod
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from gossamer.core.bounded_mean import mean_of, tensor_mean
from gossamer.core.layout import dtype_name, dtype_of
from gossamer.core.ops import AllGather, CollectiveOp
from gossamer.errors import MismatchError
from gossamer.session.average import CallLane
from gossamer.world import current

Scalar = bool | int | float | str
Named = Mapping[str, Scalar | Tensor]
Header = dict[str, Any]  # by name: the scalar itself, or [dtype, shape] of a tensor
LARGEST_INTEGER = int(sys.float_info.max)
T = TypeVar("T", bound=Scalar | Tensor | Named)


def gather(value: T) -> list[T]:
    """`value` of every worker, by rank: a number, a text, a tensor, or a dict of these by name.

    Every rank must call it at the same place. Tensors have the same shape and dtype on every rank; they come back on
    the device of this rank's own. Raises MismatchError on every rank where they differ, TypeError for other types.
    """
    return _everyones(value, "gather")


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Tensor) -> Tensor: ...
@overload
def mean(value: Mapping[str, float | Tensor]) -> dict[str, Any]: ...
def mean(value: float | Tensor | Mapping[str, float | Tensor]) -> float | Tensor | dict[str, Any]:
    """The mean over all workers of a number, a tensor elementwise, or each entry of a dict; all workers count alike.

    Numbers give a float, tensors one of their shape: of their dtype, or the default one where they hold integers. All
    ranks get the same bits. Where ranks saw different numbers of samples, take the mean of sums and of counts:

        found = gossamer.mean({"correct": correct, "seen": seen})
        accuracy = found["correct"] / found["seen"]

    Every rank must call it at the same place. For large tensors there is `average_`. Raises MismatchError on every rank
    where names, shapes or dtypes differ, TypeError for what has no mean, ValueError for an integer beyond float64.
    """
    for name, each in _named(value).items():
        if isinstance(each, str):
            raise TypeError(f"{_shown(name)}{each!r} is a text and has no mean: write gossamer.gather({each!r})")
        if type(each) is int and abs(each) > LARGEST_INTEGER:
            raise ValueError(
                f"{_shown(name)}an integer of {each.bit_length()} bits is too large for the mean, which is a float64. "
                "Write a smaller unit, such as gossamer.mean(count / 1e9)."
            )
    heard = _everyones(value, "mean")
    if isinstance(value, Mapping):
        return {name: _mean([each[name] for each in heard]) for name in value}
    return _mean(heard)


def _mean(values: Sequence[Any]) -> float | Tensor:
    if not isinstance(values[0], Tensor):
        numbers = [float(each) for each in values]
        plain = sum(numbers) / len(numbers)
        return plain if isfinite(plain) else mean_of(numbers)
    kind = values[0].dtype
    wide = torch.complex128 if kind.is_complex else torch.float64
    exact = tensor_mean(torch.stack([each.cpu().to(wide) for each in values]))
    kept = kind.is_floating_point or kind.is_complex
    return exact.to(device=values[0].device, dtype=kind if kept else torch.get_default_dtype())


def _everyones(value: Any, caller: str) -> list[Any]:
    named = {name: _checked(name, each, caller) for name, each in _named(value).items()}
    found: list[Any] = [named]
    if current().size > 1:
        headers, parts = CallLane.of_this_process(caller).run(partial(exchange, named))
        _check_alike(headers, caller)
        found = [_opened(header, flat, named) for header, flat in zip(headers, parts, strict=True)]
    return found if isinstance(value, Mapping) else [each[""] for each in found]


def _named(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _checked(name: str, value: Any, caller: str) -> Scalar | Tensor:
    """A detached tensor or a scalar of Python's own. Raises TypeError."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in (bool, int, float, str) or type(name) is not str:
        raise TypeError(
            f"gossamer.{caller} takes numbers, tensors{', texts' * (caller == 'gather')} and dicts of them by name, "
            f"and {_shown(name)}{type(value).__name__} is none: other objects would have to be unpickled where they "
            "arrive. Pass what they consist of."
        )
    return value  # type: ignore[no-any-return]


def exchange(
    named: Mapping[str, Scalar | Tensor],
) -> Generator[CollectiveOp, Any, tuple[list[Header], list[Tensor]]]:
    """Every rank's scalars and forms of tensors, and the bytes of its tensors, if all have the same forms."""
    said = json.dumps({name: _header(named[name]) for name in sorted(named)}).encode()
    lengths = [int(length) for (length,) in (yield AllGather((torch.tensor([len(said)], device="cpu"),)))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    heard = yield AllGather((padded,))
    headers = [json.loads(bytes(text[:length].tolist())) for (text,), length in zip(heard, lengths, strict=True)]
    tensors = [each for _, each in sorted(named.items()) if isinstance(each, Tensor) and each.numel()]
    flat = torch.cat([_bytes(each) for each in tensors]) if tensors else torch.empty(0, dtype=torch.uint8, device="cpu")
    if not len(flat) or any(_form(header) != _form(headers[0]) for header in headers):
        return headers, [flat] * len(headers)
    return headers, [part.clone() for (part,) in (yield AllGather((flat,)))]


def _header(value: Scalar | Tensor) -> Any:
    return [dtype_name(value.dtype), list(value.shape)] if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _form(header: Header) -> dict[str, Any]:
    """What has to be the same on every rank: the names, and dtypes and shapes of tensors."""
    return {name: each if isinstance(each, list) else None for name, each in header.items()}


def _check_alike(headers: Sequence[Header], caller: str) -> None:
    first = _form(headers[0])
    for rank, header in enumerate(headers):
        other = _form(header)
        differing = [name for name in sorted({*first, *other}) if first.get(name, ...) != other.get(name, ...)]
        if differing:
            name = differing[0]
            raise MismatchError(
                f"gossamer.{caller} was given {_shown(name)}{_told(headers[0], name)} on rank 0 and "
                f"{_told(header, name)} on rank {rank}, which do not fit together. Give the same names, shapes and "
                "dtypes on every rank: where they saw different numbers of samples, sums and counts."
            )


def _told(header: Header, name: str) -> str:
    if name not in header:
        return "nothing"
    each = header[name]
    return f"a tensor of shape {tuple(each[1])} and {each[0]}" if isinstance(each, list) else repr(each)


def _shown(name: object) -> str:
    return f'"{name}": ' if name != "" else ""


def _opened(header: Header, flat: Tensor, own: Mapping[str, Scalar | Tensor]) -> dict[str, Any]:
    """One rank's values, in this rank's order of names and on this rank's devices."""
    found: dict[str, Any] = {}
    begin = 0
    for name, each in header.items():
        if isinstance(each, list):
            kind, shape = dtype_of(each[0]), each[1]
            end = begin + prod(shape) * kind.itemsize
            mine = own[name]
            assert isinstance(mine, Tensor)  # or its form would be another
            found[name] = flat[begin:end].clone().view(kind).view(shape).to(mine.device)
            begin = end
        else:
            found[name] = each
    return {name: found[name] for name in own}
