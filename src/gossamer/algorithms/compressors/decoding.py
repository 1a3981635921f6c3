"""Decoding of a group's payloads: sums that overflow, and the sender of an invalid payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import HEADROOM, all_finite, scratch_like
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, OutOfRange

Decode = Callable[[Sequence[Payload], Tensor], None]  # overwrites the tensor with the sum of the decoded payloads


class DecodeMean(Protocol):
    """As Decode, but the sum is divided by `divisor`."""

    def __call__(self, payloads: Sequence[Payload], out: Tensor, divisor: int = 1) -> None: ...


def expect_tensors(payloads: Sequence[Payload], count: int) -> None:
    """Raise MalformedError unless each payload has `count` tensors."""
    for payload in payloads:
        if len(payload) != count:
            raise MalformedError(f"expected a payload of {count} tensors, got {len(payload)}")


def pairs(payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]]:
    """Return payloads of two tensors each. Raises MalformedError for others."""
    expect_tensors(payloads, 2)
    return [(first, second) for first, second in payloads]


def decode_mean(
    decoders: Sequence[tuple[DecodeMean, Sequence[int]]],
    received: Sequence[Payload],
    layout: Layout,
    out: Tensor,
    at: AggregationContext,
) -> bool:
    """Overwrite `out`: (n,) with the mean of the ranks' payloads; return whether the result is finite.

    Args:
        decoders: each with the ranks whose payloads it decodes, ascending. Sums of several decoders are added in this
            order, so all ranks receive the same bits.
        received: payloads, by rank.
        layout: that of `out`.
        out: receives the result.
        at: the step and the number of ranks.
    """
    (first, _), *others = decoders
    if not others:
        return decode_received(partial(first, divisor=at.world), received, layout, out, at)
    if out.is_meta:
        return True
    finite, room = True, scratch_like(out)
    for decode, ranks in decoders:
        into = out if decode is first else room
        finite &= decode_received(decode, [received[rank] for rank in ranks], layout, into, at, ranks)
        if into is room:
            out.add_(room)
    out.div_(at.world)
    return finite and all_finite(out)  # each sum is finite, and their sum may overflow


def decode_received(
    decode: Decode,
    received: Sequence[Payload],
    layout: Layout | None,
    out: Tensor,
    at: AggregationContext,
    ranks: Sequence[int] | None = None,
) -> bool:
    """Overwrite `out`: (n,) with the decoded payloads, in the order of ranks; return whether the result is finite.

    All ranks receive the same payloads and reach the same conclusion, from the few numbers in the payloads and without
    a pass over `out`. If sums overflow, `out` is not finite in the tensors concerned.

    Args:
        decode: writes the sum of the decoded payloads.
        received: payloads, one per rank.
        layout: that of `out`, to name a tensor in an error; None if unknown.
        out: receives the result.
        at: the step, for an error.
        ranks: the senders of the payloads; None: all ranks.

    Raises:
        MalformedError: a payload is invalid; the message has the rank, the step and if possible the tensor. Raised
            before anything is written.
    """
    if out.is_meta:  # to count bytes nothing is added, possibly for ten thousand payloads
        return True
    try:
        return decode_in_range(decode, received, out)
    except MalformedError:
        for rank, payload in zip(range(len(received)) if ranks is None else ranks, received, strict=True):
            _blame(decode, payload, layout, torch.empty_like(out), rank, at)
        raise


def decode_in_range(decode: Decode, received: Sequence[Payload], out: Tensor) -> bool:
    """As decode_received, without the sender in an error."""
    try:
        decode(received, out)
    except OutOfRange:
        far = 2.0 * HEADROOM**2 * len(received)  # a codec may be wrapped in another
        decode([_scaled(payload, 1 / far) for payload in received], out)
        out.mul_(far)
        return False
    return True


@contextmanager
def sent_by(rank: int, at: AggregationContext, tensor: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Add the rank, the step and the tensor to a MalformedError."""
    try:
        yield
    except OutOfRange:
        raise
    except MalformedError as error:
        name = tensor()
        raise MalformedError(
            f"the payload of rank {rank} in step {at.step}{'' if name is None else f' for tensor {name!r}'} cannot be "
            f"decoded, and none of it was applied: {error}. It was corrupted in transit, or the sender runs another "
            "version, recipe or model."
        ) from error


def _blame(
    decode: Decode, payload: Payload, layout: Layout | None, room: Tensor, rank: int, at: AggregationContext
) -> None:
    """Raise MalformedError if this payload cannot be decoded alone."""
    with suppress(OutOfRange), sent_by(rank, at, lambda: _nonfinite_tensor(decode, payload, layout, room)):
        decode([payload], room)


def _scaled(payload: Payload, factor: float) -> Payload:
    return tuple(tensor * factor if tensor.is_floating_point() else tensor for tensor in payload)


def _nonfinite_tensor(decode: Decode, payload: Payload, layout: Layout | None, room: Tensor) -> str | None:
    """Return the first tensor for which the payload has a value that is not finite; None if unknown."""
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
