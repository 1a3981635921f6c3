"""What a session tells its listeners when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gossamer import checkpoint, events
from gossamer.buckets import Bucket, Buffers, layouts, moving_bytes
from gossamer.control import control_bytes
from gossamer.recipe import Recipe
from gossamer.transports.base import Transport


def begun(model: nn.Module, recipe: Recipe, buckets: Sequence[Bucket], transport: Transport) -> events.Attached:
    return events.Attached(
        recipe=repr(recipe),
        layouts=tuple(layouts(buckets)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buffer_bytes=moving_bytes(model),
        control_bytes=control_bytes(sum(len(bucket.parameters) for bucket in buckets), len(Buffers(model))),
        rank=transport.rank,
        world=transport.world,
    )


def ended(model: nn.Module, steps: int, buckets: Sequence[Bucket]) -> events.Closed:
    return events.Closed(
        steps=steps,
        digest=checkpoint.digest(model.parameters()),
        residual_bytes=sum(bucket.residual_bytes for bucket in buckets),
        bucket_bytes=sum(bucket.flat.nbytes for bucket in buckets),
    )
