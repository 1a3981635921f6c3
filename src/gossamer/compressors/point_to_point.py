"""What one worker says alone, to be read elsewhere: any compressor between two peers.

A compressor is written for a group. A group of one hears what it said itself, so what it said is all that another needs
to come to the same mean: the reader runs the same script over numbers of its own, which do not count, and hears the
writer's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.compressors.base import Compressor, Decoder, sums_stay_finite
from gossamer.core import rng
from gossamer.core.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.core.identity import Itself
from gossamer.core.layout import FlatTensors, Layout, LayoutPart
from gossamer.core.ops import CollectiveOp, Payload
from gossamer.errors import MalformedError


class EncodedMessage(NamedTuple):
    """payload: what travels, perhaps in memory of x; own: what it stands for; next_state: for once it was sent."""

    payload: Payload
    own: Callable[[], Tensor]
    next_state: State


def begin(compressor: Compressor, like: FlatTensors, at: AggregationContext) -> State:
    """What a writer remembers at first."""
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
    """Overwrite out: (n,) with what a letter stands for; at: of its writer, `state` of either does not matter.

    Raises MalformedError for what no writer has written; what `out` holds is then undefined.
    """
    parts = _parts_of(Itself(compressor), Itself(layout), out.dtype)
    if parts is None:
        finite = _read_by_script(compressor, payload, layout, at, out)
    else:
        _check_count(compressor, len(payload), sum(part.tensors for part in parts))
        _decode(parts, payload, layout, out)
        finite = sums_stay_finite([payload])
    if not finite:
        raise MalformedError("a letter came whose numbers are not finite")


class MessagePart(NamedTuple):
    """What one decoder reads: so many tensors, over the slots from `start` on, or where they lie apart, None."""

    decoder: Decoder
    layout: Layout
    tensors: int
    start: int | None


@lru_cache(maxsize=256)
def _parts_of(
    compressor: Itself[Compressor], layout: Itself[Layout], dtype: torch.dtype
) -> tuple[MessagePart, ...] | None:
    """The same objects come again and again; what is only equal to them is found below."""
    return _parts(compressor.item, layout.item, dtype)


@lru_cache(maxsize=1024)
def _parts(compressor: Compressor, layout: Layout, dtype: torch.dtype) -> tuple[MessagePart, ...] | None:
    """Found once for each layout: many small letters would cost more to take apart than to decode."""
    found = compressor.decoders(layout)
    if found is None:
        return None
    return tuple(
        MessagePart(decoder, part, decoder.tensors(part, dtype), LayoutPart.of(layout, part.names).start)
        for decoder, part in found
        if len(part)
    )


def _decode(parts: Sequence[MessagePart], payload: Payload, layout: Layout, out: Tensor) -> None:
    rest = payload
    for decoder, part, tensors, start in parts:
        said, rest = rest[:tensors], rest[tensors:]
        if start is not None:
            decoder.decode([said], part, out[start : start + part.numel])
            continue
        apart = FlatTensors(torch.empty(part.numel, dtype=out.dtype, device=out.device), part)
        decoder.decode([said], part, apart.flat)
        for name, view in apart.items():
            layout.by_name[name].view(out).copy_(view)


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
    return staged.finite


def _check_count(compressor: Compressor, came: int, due: int) -> None:
    if came != due:
        raise MalformedError(f"a letter of {came} tensors came, and {compressor!r} writes {due}")


def _by_itself(at: AggregationContext) -> AggregationContext:
    """Where a worker stands that is a group of its own; its draws are still no other worker's."""
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
        raise MalformedError(f"a letter ended after {len(taken)} of {len(like)} tensors")
    return taken
