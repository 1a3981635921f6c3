"""Point-to-point encoding: any compressor between two peers.

A compressor is written for a group. The writer runs it in a group of one, whose answers are its own tensors, and sends
these. The reader runs the same script over numbers that do not count, is answered with the writer's tensors, and comes
to the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder
from gossamer.algorithms.compressors.decoding import Decode, decode_heard, decoded_by
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.identity import Itself
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors, Layout, LayoutPart, accumulation_dtype, first_nonfinite
from gossamer.base.ops import CollectiveOp, Payload
from gossamer.errors import MalformedError


class EncodedMessage(NamedTuple):
    """One message of a writer."""

    payload: Payload  # perhaps in memory of x
    own: Callable[[], Tensor]  # computes what it stands for
    next_state: State  # to commit once it was sent


def begin(compressor: Compressor, like: FlatTensors, at: AggregationContext) -> State:
    """A writer's state at first."""
    return compressor.init(like, _by_itself(at))


def encode(compressor: Compressor, x: FlatTensors, state: State, at: AggregationContext) -> EncodedMessage:
    """Encode x. x.flat: (n,), only read; at: of the writer. own() is (n,) and must be asked before x is written.

    Raises NotFinite.
    """
    said: list[Tensor] = []

    def hear_oneself(op: CollectiveOp) -> Any:
        said.extend(op.tensors())
        return op.answer_alone(lambda payload: payload)

    staged = _alone(compressor.aggregate(x, state, _by_itself(at)), hear_oneself)
    return EncodedMessage(tuple(said), staged.own_contribution, staged.next_state)


def decode(compressor: Compressor, payload: Payload, layout: Layout, at: AggregationContext, out: Tensor) -> None:
    """Overwrite out: (n,) with what a message stands for. at: of its writer; the state of either does not matter.

    Raises MalformedError for what no writer has written; what `out` holds is then undefined.
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
            f"a message of {compressor!r} for step {at.step} holds numbers that are not finite"
            f"{'' if found is None else f' (tensor {found!r})'}, so nothing of it was applied. Its sender's numbers "
            "overflowed: see the sender's own log."
        )


class MessagePart(NamedTuple):
    """The tensors of a message that one decoder reads."""

    decoder: Decoder
    tensors: int  # how many
    place: LayoutPart  # what they stand for


@lru_cache(maxsize=256)
def _parts_of(
    compressor: Itself[Compressor], layout: Itself[Layout], dtype: torch.dtype
) -> tuple[MessagePart, ...] | None:
    """The same objects come again and again; what is only equal to them is found below."""
    return _parts(compressor.item, layout.item, dtype)


@lru_cache(maxsize=1024)
def _parts(compressor: Compressor, layout: Layout, dtype: torch.dtype) -> tuple[MessagePart, ...] | None:
    """Found once for each layout: many small messages would cost more to take apart than to decode."""
    found = compressor.decoders(layout)
    if found is None:
        return None
    return tuple(
        MessagePart(
            decoder, decoder.tensors(part, dtype), LayoutPart(part, tuple(layout.by_name[name] for name in part.names))
        )
        for decoder, part in found
        if len(part)
    )


def _decode(parts: Sequence[MessagePart], payload: Payload, out: Tensor, at: AggregationContext) -> bool:
    """Whether the numbers were finite."""
    rest, finite = payload, True
    for decoder, tensors, place in parts:
        said, rest = rest[:tensors], rest[tensors:]
        if place.start is not None:
            span = out[place.start : place.start + place.layout.numel]
            finite &= decode_heard(_reader(decoder, place.layout), [said], place.layout, span, at, at.rank)
            continue
        apart = out.new_empty(place.layout.numel)
        finite &= decode_heard(_reader(decoder, place.layout), [said], place.layout, apart, at, at.rank)
        place.scatter(apart, out)
    narrow = out.dtype != accumulation_dtype(out.dtype)  # than what numbers are added up in
    return finite and not (narrow and not all_finite(out))


def _reader(decoder: Decoder, layout: Layout) -> Decode:
    return lambda payloads, into: decoder.decode(payloads, layout, into)


def _read_by_script(
    compressor: Compressor, payload: Payload, layout: Layout, at: AggregationContext, out: Tensor
) -> bool:
    """Whether the numbers were finite."""
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
            f"a message of {came} tensors came, and {compressor!r} writes {due}: its sender has another recipe or model"
        )


def _by_itself(at: AggregationContext) -> AggregationContext:
    """The context of a worker that is a group of its own; its draws are still no other worker's."""
    return replace(at, world=1, rank=0, seed=rng.address("letter", at.seed, at.rank))


def _alone(script: Aggregation, answered: Callable[[CollectiveOp], Any]) -> AggregationResult:
    op = next(script)
    while True:
        try:
            op = script.send(answered(op))
        except StopIteration as stop:
            staged: AggregationResult = stop.value
            return staged


def _taken(like: Payload, said: Iterator[Tensor]) -> Payload:
    taken = tuple(tensor for _, tensor in zip(like, said, strict=False))
    if len(taken) < len(like):
        raise MalformedError(f"a message ended after {len(taken)} of {len(like)} tensors")
    return taken
