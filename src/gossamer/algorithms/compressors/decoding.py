"""Decoding of what a group sent: sums that leave their range, and whose payload it was that nobody can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import HEADROOM
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, OutOfRange

Decode = Callable[[Sequence[Payload], Tensor], None]  # overwrites the tensor with the sum of what payloads stand for


def expect_tensors(payloads: Sequence[Payload], count: int) -> None:
    """Raise MalformedError unless each payload has so many tensors."""
    for payload in payloads:
        if len(payload) != count:
            raise MalformedError(f"a payload of {count} tensors was due, and one of {len(payload)} came")


def pairs(payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]]:
    """Payloads of two tensors each. Raises MalformedError for others."""
    expect_tensors(payloads, 2)
    return [(first, second) for first, second in payloads]


def decode_heard(
    decode: Decode, heard: Sequence[Payload], layout: Layout | None, out: Tensor, at: AggregationContext, first: int = 0
) -> bool:
    """Overwrite `out`: (n,) with what `decode` makes of payloads, in the order of ranks; whether that is finite.

    All ranks have heard the same, so all come to the same conclusion, from the few numbers in the payloads, without a
    pass over `out`. Where sums would leave the range, `out` shows in which tensors. Raises MalformedError, which names
    rank, step and where it can the tensor of `layout`, before anything is written. first: the rank of heard[0].
    """
    if out.is_meta:  # a price has no numbers to add up, and may be asked for ten thousand payloads
        return True
    try:
        decode(heard, out)
    except OutOfRange:
        far = 2.0 * HEADROOM**2 * len(heard)  # a codec may stand in another
        decode([_scaled(payload, 1 / far) for payload in heard], out)
        out.mul_(far)
        return False
    except MalformedError:
        for rank, payload in enumerate(heard, first):
            _blame(decode, payload, layout, torch.empty_like(out), rank, at)
        raise
    return True


@contextmanager
def sent_by(rank: int, at: AggregationContext, tensor: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Name rank, step and tensor in a MalformedError."""
    try:
        yield
    except OutOfRange:
        raise
    except MalformedError as error:
        name = tensor()
        raise MalformedError(
            f"what rank {rank} sent in step {at.step}{'' if name is None else f' for tensor {name!r}'} cannot be "
            f"decoded, so nothing of it was applied: {error}. It was damaged on its way, or its sender runs another "
            "version, recipe or model."
        ) from error


@contextmanager
def decoded_by(compressor: object) -> Iterator[None]:
    """Name the compressor in a MalformedError."""
    try:
        yield
    except OutOfRange:
        raise
    except MalformedError as error:
        raise MalformedError(f"{compressor!r} met a payload that it has not made: {error}") from error


def _blame(
    decode: Decode, payload: Payload, layout: Layout | None, room: Tensor, rank: int, at: AggregationContext
) -> None:
    """Raise MalformedError where this payload cannot be decoded by itself."""
    with suppress(OutOfRange), sent_by(rank, at, lambda: _nonfinite_tensor(decode, payload, layout, room)):
        decode([payload], room)


def _scaled(payload: Payload, factor: float) -> Payload:
    return tuple(tensor * factor if tensor.is_floating_point() else tensor for tensor in payload)


def _nonfinite_tensor(decode: Decode, payload: Payload, layout: Layout | None, room: Tensor) -> str | None:
    """The first tensor that a number of the payload which is not finite belongs to; None where that cannot be told."""
    if layout is None:
        return None
    marks = tuple(
        (~torch.isfinite(tensor)).to(tensor.dtype) if tensor.is_floating_point() else tensor for tensor in payload
    )
    try:
        decode([marks], room)
    except MalformedError:
        return None
    found = FlatTensors(room, layout)
    return next((name for name, view in found.items() if bool(view.any())), None)
