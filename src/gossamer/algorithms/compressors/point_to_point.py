"""Point-to-point encoding: any compressor between two peers.

A compressor is written for a group. The sender runs it in a group of one, answers its operations with its own tensors,
and sends these tensors. The receiver runs the same script with a dummy input, answers it with the sender's tensors, and
computes the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder, decoded_by
from gossamer.algorithms.compressors.decoding import Decode, decode_received
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors, Itself, Layout, LayoutPart, accumulation_dtype, first_nonfinite
from gossamer.base.ops import CollectiveOp, Payload
from gossamer.errors import MalformedError


class EncodedMessage(NamedTuple):
    """One encoded message of a sender."""

    payload: Payload  # may alias x
    own: Callable[[], Tensor]  # computes the decoded message
    next_state: State  # to commit once the message was sent


def begin(compressor: Compressor, like: FlatTensors, at: AggregationContext) -> State:
    """Return the sender's initial state."""
    return compressor.init(like, _by_itself(at))


def encode(compressor: Compressor, x: FlatTensors, state: State, at: AggregationContext) -> EncodedMessage:
    """Encode x. x.flat: (n,), read only; at: of the sender. own() is (n,) and must be called before x is modified.

    Raises NotFinite.
    """
    sent: list[Tensor] = []

    def answer_itself(op: CollectiveOp) -> Any:
        sent.extend(op.tensors())
        return op.answer_alone(lambda payload: payload)

    staged = _alone(compressor.aggregate(x, state, _by_itself(at)), answer_itself)
    return EncodedMessage(tuple(sent), staged.own_contribution, staged.next_state)


def decode(compressor: Compressor, payload: Payload, layout: Layout, at: AggregationContext, out: Tensor) -> None:
    """Overwrite out: (n,) with the decoded message. at: of its sender. No state of either peer is needed.

    Raises MalformedError for a message that no sender encodes; the content of `out` is then undefined.
    """
    parts = _parts_of(Itself(compressor), Itself(layout), out.dtype)
    if parts is not None:
        _check_count(compressor, len(payload), sum(part.tensors for part in parts))
    with decoded_by(compressor):
        if parts is None:
            finite = _read_by_script(compressor, payload, layout, at, out)
        else:
            finite = _decode(parts, payload, out, at)
    if not finite:
        found = None if out.is_meta else first_nonfinite(FlatTensors(out, layout))
        raise MalformedError(
            f"a message of {compressor!r} for step {at.step} has numbers that are not finite"
            f"{'' if found is None else f' (tensor {found!r})'}, so none of it was applied. The sender's numbers "
            "overflowed: see the sender's log."
        )


class MessagePart(NamedTuple):
    """The tensors of a message that one decoder reads."""

    decoder: Decoder
    tensors: int  # number of tensors
    place: LayoutPart  # the tensors that they decode to


@lru_cache(maxsize=256)
def _parts_of(
    compressor: Itself[Compressor], layout: Itself[Layout], dtype: torch.dtype
) -> tuple[MessagePart, ...] | None:
    """Return `_parts`, cached by identity: the same objects are passed at every step."""
    return _parts(compressor.item, layout.item, dtype)


@lru_cache(maxsize=1024)
def _parts(compressor: Compressor, layout: Layout, dtype: torch.dtype) -> tuple[MessagePart, ...] | None:
    """Return the parts of a message, cached by layout: for small messages this takes longer than decoding.

    None also if a message has fewer tensors than its parts: uncompressed parts of nested Routes are sent as one tensor.
    """
    found = compressor.decoders(layout)
    if found is None:
        return None
    parts = tuple(
        MessagePart(
            decoder, decoder.tensors(part, dtype), LayoutPart(part, tuple(layout.by_name[name] for name in part.names))
        )
        for decoder, part in found
        if len(part)
    )
    several = len(parts) > 1
    return None if several and _tensors(compressor, layout, dtype) < sum(part.tensors for part in parts) else parts


def _tensors(compressor: Compressor, layout: Layout, dtype: torch.dtype) -> int:
    """Return the number of tensors of a message."""
    x, at = FlatTensors.zeros(layout, dtype=dtype, device=torch.device("meta")), AggregationContext()
    return len(encode(compressor, x, begin(compressor, x, at), at).payload)


def _decode(parts: Sequence[MessagePart], payload: Payload, out: Tensor, at: AggregationContext) -> bool:
    """Decode the parts; return whether the numbers are finite."""
    rest, finite = payload, True
    for decoder, tensors, place in parts:
        sent, rest = rest[:tensors], rest[tensors:]
        if place.start is not None:
            span = out[place.start : place.start + place.layout.numel]
            finite &= decode_received(_reader(decoder, place.layout), [sent], place.layout, span, at, (at.rank,))
            continue
        apart = out.new_empty(place.layout.numel)
        finite &= decode_received(_reader(decoder, place.layout), [sent], place.layout, apart, at, (at.rank,))
        place.scatter(apart, out)
    narrow = out.dtype != accumulation_dtype(out.dtype)  # than the dtype of sums
    return finite and not (narrow and not all_finite(out))


def _reader(decoder: Decoder, layout: Layout) -> Decode:
    return lambda payloads, into: decoder.decode(payloads, layout, into)


def _read_by_script(
    compressor: Compressor, payload: Payload, layout: Layout, at: AggregationContext, out: Tensor
) -> bool:
    """Decode by running the script; return whether the numbers are finite."""
    rest = iter(payload)
    device = torch.device("meta") if compressor.decodes_without_input else out.device
    x = FlatTensors.zeros(layout, dtype=out.dtype, device=device)
    script = compressor.aggregate(x, begin(compressor, x, at), _by_itself(at), out)
    staged = _alone(script, lambda op: op.answer_alone(lambda payload: _taken(payload, rest)))
    left = len(list(rest))
    _check_count(compressor, len(payload), len(payload) - left)
    return staged.finite and all_finite(out)


def _check_count(compressor: Compressor, came: int, due: int) -> None:
    if came != due:
        raise MalformedError(
            f"expected a message of {due} tensors for {compressor!r}, got {came}: the sender has another recipe "
            "or model"
        )


def _by_itself(at: AggregationContext) -> AggregationContext:
    """Return the context of a worker in a group of one; its random numbers still differ from other workers'."""
    return replace(at, world=1, rank=0, seed=rng.address("letter", at.seed, at.rank))


def _alone(script: Aggregation, answered: Callable[[CollectiveOp], Any]) -> AggregationResult:
    op = next(script)
    while True:
        try:
            op = script.send(answered(op))
        except StopIteration as stop:
            staged: AggregationResult = stop.value
            return staged


def _taken(like: Payload, sent: Iterator[Tensor]) -> Payload:
    taken = tuple(tensor for _, tensor in zip(like, sent, strict=False))
    if len(taken) < len(like):
        raise MalformedError(f"the message ended after {len(taken)} of {len(like)} tensors")
    return taken
