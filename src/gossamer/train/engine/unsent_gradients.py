"""Unsent gradients: reads what compressors still owe out of one recipe's buckets, and hands it to those of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL
from gossamer.algorithms.compressors.hierarchical import Hierarchical, place_of
from gossamer.algorithms.compressors.sharded import settle
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import accumulation_dtype
from gossamer.train.engine.bucket import Bucket

Owed = dict[str, Tensor]  # by parameter name, in its shape


def unsent(bucket: Bucket, compressor: Compressor, at: AggregationContext) -> Tensor:
    """What this worker has still to send of a bucket's tensors: (n,), at least in float32.

    law: its mean over the workers is what the group has still to hear; what parts owe the group is settled into it, and
    a node's residual counts once in the node, so the worker that keeps it has `per_node` times as much.
    """
    settle(bucket.state, at)  # what the group owes itself moves into the memory of whoever answers for the part
    total = torch.zeros_like(bucket.flat, dtype=accumulation_dtype(bucket.flat.dtype))
    per_node = max((each.per_node for each in compressor.held() if isinstance(each, Hierarchical)), default=1)
    for key, packed in bucket.state.items():
        if not _is_residual(key):
            continue
        place = place_of(key)
        for slot in packed.layout:
            whole, kept = bucket.layout.by_name[slot.name].flat_view(total), slot.flat_view(packed.flat)
            if place is None:
                whole.add_(kept)
            else:
                span = whole[place * slot.numel :][: slot.numel]
                span.add_(kept[: len(span)], alpha=per_node)
    return total


def forget_residuals(bucket: Bucket) -> None:
    """What compressors have left out is not to be sent again: it is somewhere else already."""
    for key, packed in bucket.state.items():
        if _is_residual(key):
            packed.flat.zero_()


def owed_gradients(buckets: Iterable[Bucket], compressor: Compressor, at: AggregationContext) -> Owed:
    """What this worker has still to send, of tensors about which something is remembered."""
    found: Owed = {}
    for bucket in buckets:
        total = unsent(bucket, compressor, at)
        names = {name for key, packed in bucket.state.items() if _is_residual(key) for name in packed.layout.names}
        found |= {slot.name: slot.view(total) for slot in bucket.layout if slot.name in names}
    return found


def take_up(owed: Mapping[str, Tensor], buckets: Iterable[Bucket]) -> Owed:
    """Put what is owed into the residuals of `buckets`, bit for bit where there is one; returns what has no place."""
    left = dict(owed)
    for bucket in buckets:
        for key, packed in bucket.state.items():
            if _is_residual(key) and place_of(key) is None:
                for name, view in packed.items():
                    if name in left:
                        view.copy_(left.pop(name))
    return left


def _is_residual(key: str) -> bool:
    return key.rpartition(".")[2] == RESIDUAL
