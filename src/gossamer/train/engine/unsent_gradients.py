"""Unsent gradients: reads residuals of one recipe's compressors from its buckets, and adds them to another's."""

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

Unsent = dict[str, Tensor]  # by parameter name, in its shape


def unsent(bucket: Bucket, compressor: Compressor, at: AggregationContext) -> Tensor:
    """Unsent values of a bucket's tensors on this worker: (n,), at least in float32.

    law: their mean over the workers is the unsent part of the group's mean. Values that shards have not delivered to
    the group are settled into them, and the worker that keeps a node's residual counts it `per_node` times.
    """
    settle(bucket.state, at)  # undelivered values move to the residual of the shard's owner
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
    """Clear the residuals of a bucket after their values were moved elsewhere."""
    for key, packed in bucket.state.items():
        if _is_residual(key):
            packed.flat.zero_()


def unsent_gradients(buckets: Iterable[Bucket], compressor: Compressor, at: AggregationContext) -> Unsent:
    """Unsent values of this worker, for tensors with residuals."""
    found: Unsent = {}
    for bucket in buckets:
        total = unsent(bucket, compressor, at)
        names = {name for key, packed in bucket.state.items() if _is_residual(key) for name in packed.layout.names}
        found |= {slot.name: slot.view(total) for slot in bucket.layout if slot.name in names}
    return found


def take_up(gradients: Mapping[str, Tensor], buckets: Iterable[Bucket]) -> Unsent:
    """Write unsent values into the residuals of `buckets`, bit for bit. Returns those without a residual there."""
    left = dict(gradients)
    for bucket in buckets:
        for key, packed in bucket.state.items():
            if _is_residual(key) and place_of(key) is None:
                for name, view in packed.items():
                    if name in left:
                        view.copy_(left.pop(name))
    return left


def _is_residual(key: str) -> bool:
    return key.rpartition(".")[2] == RESIDUAL
