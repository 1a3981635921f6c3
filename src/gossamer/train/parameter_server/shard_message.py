"""Shard message: the encoded blocks of a shard, one message each, as one payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError


class ShardMessage(NamedTuple):
    """The encoded blocks of a shard."""

    payload: Payload  # the tensors of all blocks
    counts: tuple[int, ...]  # number of tensors of each block
    states: tuple[State, ...]  # the compressor's state by block, after the message


def initial_states(compressor: Compressor, blocks: Sequence[FlatTensors], at: AggregationContext) -> tuple[State, ...]:
    """The compressor's state before the first message, by block."""
    return tuple(point_to_point.begin(compressor, block, at) for block in blocks)


def encode(
    compressor: Compressor,
    blocks: Sequence[FlatTensors],
    states: Sequence[State],
    contexts: Sequence[AggregationContext],
) -> ShardMessage:
    """Encode all blocks, each in its context. Blocks are not modified; the payload may contain views of them.

    Raises NotFinite.
    """
    messages = [
        point_to_point.encode(compressor, block, state, at)
        for block, state, at in zip(blocks, states, contexts, strict=True)
    ]
    return ShardMessage(
        tuple(tensor for message in messages for tensor in message.payload),
        tuple(len(message.payload) for message in messages),
        tuple(message.next_state.after(state) for message, state in zip(messages, states, strict=True)),
    )


def decode(
    compressor: Compressor,
    payload: Payload,
    counts: Sequence[int],
    blocks: Sequence[FlatTensors],
    at: AggregationContext,
) -> tuple[Tensor, ...]:
    """Decode blocks: (n,) each, in new memory and the block's dtype. Raises MalformedError."""
    if len(counts) != len(blocks) or sum(counts) != len(payload) or min(counts, default=0) < 0:
        raise MalformedError(
            f"a message for step {at.step} has {len(payload)} tensors, divided as {list(counts)} over {len(blocks)} "
            "blocks: its sender runs another model or recipe; nothing of it was applied"
        )
    found: list[Tensor] = []
    start = 0
    for count, block in zip(counts, blocks, strict=True):
        out = torch.empty_like(block.flat)
        try:
            point_to_point.decode(compressor, payload[start : start + count], block.layout, at, out)
        except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:  # wrong shapes or dtypes
            raise MalformedError(
                f"a message for step {at.step} is not valid for {compressor!r}: {error}; nothing "
                "of it was applied. Run the same script with the same recipe on every worker"
            ) from error
        if not all_finite(out):
            raise MalformedError(
                f"a message of {compressor!r} for step {at.step} has non-finite values in "
                f'"{_first_nonfinite(out, block.layout)}"; nothing of it was applied. They overflowed on the sender: '
                "see its log"
            )
        found.append(out)
        start += count
    return tuple(found)


def _first_nonfinite(flat: Tensor, layout: Layout) -> str:
    return next((name for name, tensor in FlatTensors(flat, layout).items() if not tensor.isfinite().all()), "")
