"""Metrics over all workers: gossamer.mean and gossamer.gather for numbers, texts and small tensors, with or without a
session. Values are sent as JSON and as bytes of tensors; nothing is unpickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from gossamer.base.bounded_mean import mean_of, tensor_mean
from gossamer.base.ops import AllGather, CollectiveOp
from gossamer.train.session.average import CallLane
from gossamer.train.session.named_values import (
    Header,
    Named,
    Scalar,
    check_alike,
    described,
    flat_bytes,
    form_of,
    gathered,
    opened,
    shown,
    survivor_calls,
)
from gossamer.train.world_state import current

LARGEST_INTEGER = int(sys.float_info.max)
T = TypeVar("T", bound=Scalar | Tensor | Named)


def gather(value: T) -> list[T]:
    """Return `value` of every worker, by rank. Every rank must call it at the same place.

    With recipes that tolerate the loss of a worker (dedicated parameter servers, pairwise gossip) the list has only the
    remaining workers: gossamer.gather(world.rank) returns their ranks.

    Args:
        value: a number, a text, a tensor, or a dict of these by name. Tensors must have the same shape and dtype on
            every rank; results are on the device of this rank's tensor.

    Raises:
        MismatchError: on every rank, if names, shapes or dtypes differ.
        TypeError: another type.

    Example:
        >>> gossamer.gather(0.5)
        [0.5]
    """
    return _values_by_rank(value, "gather")


@overload
def mean(value: float) -> float: ...
@overload
def mean(value: Tensor) -> Tensor: ...
@overload
def mean(value: Mapping[str, float | Tensor]) -> dict[str, Any]: ...
def mean(value: float | Tensor | Mapping[str, float | Tensor]) -> float | Tensor | dict[str, Any]:
    """Return the mean over all workers, with equal weights and the same bits on all ranks. Every rank must call it at
    the same place.

    If ranks have different numbers of samples, average sums and counts, and divide the means.

    With recipes that tolerate the loss of a worker (dedicated parameter servers, pairwise gossip) the mean is over the
    remaining workers, and a notice names the missing ranks once. For large tensors use `average_`.

    Args:
        value: a number, a tensor, or a dict of these by name.

    Returns:
        A float for numbers; for tensors the elementwise mean, with their dtype, or the default dtype for integers.

    Raises:
        MismatchError: on every rank, if names, shapes or dtypes differ.
        TypeError: a text or another type without a mean.
        ValueError: an integer is too large for float64.

    Example:
        >>> found = gossamer.mean({"correct": 90, "seen": 100})
        >>> found["correct"] / found["seen"]
        0.9
    """
    for name, each in _named(value).items():
        if isinstance(each, str):
            raise TypeError(f"{shown(name)}{each!r} is a text and has no mean: write gossamer.gather({each!r})")
        if type(each) is int and abs(each) > LARGEST_INTEGER:
            raise ValueError(
                f"{shown(name)}an integer of {each.bit_length()} bits is too large for the mean, which is a float64. "
                "Write a smaller unit, such as gossamer.mean(count / 1e9)."
            )
    received = _values_by_rank(value, "mean")
    if isinstance(value, Mapping):
        return {name: _mean([each[name] for each in received]) for name in value}
    return _mean(received)


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


def _values_by_rank(value: Any, caller: str) -> list[Any]:
    named = {name: _checked(name, each, caller) for name, each in _named(value).items()}
    found: list[Any] = [named]
    if (world := current()).size > 1:
        if (calls := survivor_calls(world)) is not None:
            found = gathered(calls, caller, named)
        else:
            headers, parts = CallLane.of_this_process(caller).run(partial(exchange, named))
            check_alike(dict(enumerate(headers)), caller)
            found = [opened(header, flat, named) for header, flat in zip(headers, parts, strict=True)]
    return found if isinstance(value, Mapping) else [each[""] for each in found]


def _named(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _checked(name: str, value: Any, caller: str) -> Scalar | Tensor:
    """A detached tensor or a Python scalar. Raises TypeError."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in (bool, int, float, str) or type(name) is not str:
        raise TypeError(
            f"gossamer.{caller} takes numbers, tensors{', texts' * (caller == 'gather')} and dicts of them by name, "
            f"got {shown(name)}{type(value).__name__}: other objects would have to be pickled. Pass their parts."
        )
    return value  # type: ignore[no-any-return]


def exchange(
    named: Mapping[str, Scalar | Tensor],
) -> Generator[CollectiveOp, Any, tuple[list[Header], list[Tensor]]]:
    """Exchange scalars and forms of tensors, and the bytes of tensors if all ranks have the same forms."""
    description = described(named)
    lengths = [int(length) for (length,) in (yield AllGather((torch.tensor([len(description)], device="cpu"),)))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(description)] = torch.frombuffer(bytearray(description), dtype=torch.uint8)
    received = yield AllGather((padded,))
    headers = [json.loads(bytes(text[:length].tolist())) for (text,), length in zip(received, lengths, strict=True)]
    flat = flat_bytes(named)
    if not len(flat) or any(form_of(header) != form_of(headers[0]) for header in headers):
        return headers, [flat] * len(headers)
    return headers, [part.clone() for (part,) in (yield AllGather((flat,)))]
