"""One letter for each of a shard's blocks, as one payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.compressors import Compressor, point_to_point
from gossamer.core.aggregation import AggregationContext, State
from gossamer.core.layout import FlatTensors
from gossamer.core.ops import Payload
from gossamer.errors import MalformedError
from gossamer.kernels import all_finite


class ShardCodec(NamedTuple):
    """payload: all letters' tensors; counts: how many of them each block's letter has.

    own: what each letter stands for, to be called before its input is written; states: to be remembered once it was
    sent.
    """

    payload: Payload
    counts: tuple[int, ...]
    own: tuple[Callable[[], Tensor], ...]
    states: tuple[State, ...]


def begin(compressor: Compressor, blocks: Sequence[FlatTensors], at: AggregationContext) -> tuple[State, ...]:
    """What a writer remembers at first, for each block."""
    return tuple(point_to_point.begin(compressor, block, at) for block in blocks)


def write(
    compressor: Compressor, blocks: Sequence[FlatTensors], states: Sequence[State], at: AggregationContext
) -> ShardCodec:
    """Encode all blocks, which are only read; the payload may be views of them. Raises NotFinite."""
    written = [point_to_point.encode(compressor, block, state, at) for block, state in zip(blocks, states, strict=True)]
    return ShardCodec(
        tuple(tensor for letter in written for tensor in letter.payload),
        tuple(len(letter.payload) for letter in written),
        tuple(letter.own for letter in written),
        tuple(letter.next_state.after(state) for letter, state in zip(written, states, strict=True)),
    )


def read(
    compressor: Compressor,
    payload: Payload,
    counts: Sequence[int],
    blocks: Sequence[FlatTensors],
    at: AggregationContext,
) -> tuple[Tensor, ...]:
    """What a bundle stands for: (n,) for each block, fresh, in the block's dtype. Raises MalformedError."""
    if len(counts) != len(blocks) or sum(counts) != len(payload) or min(counts, default=0) < 0:
        raise MalformedError(f"{len(payload)} tensors came as {list(counts)} for {len(blocks)} blocks")
    found: list[Tensor] = []
    start = 0
    for count, block in zip(counts, blocks, strict=True):
        out = torch.empty_like(block.flat)
        point_to_point.decode(compressor, payload[start : start + count], block.layout, at, out)
        if not all_finite(out):
            raise MalformedError("a letter came that stands for numbers that are not finite")
        found.append(out)
        start += count
    return tuple(found)
