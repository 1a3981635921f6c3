"""Lifecycle events: builds Attached and Closed, which open and end a run's record, and checks logged numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import checkpoint, events
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.averaged_state import averaged_bytes, optimizer_state_keys
from gossamer.reducer.bucket import Bucket, layouts
from gossamer.reducer.model_buffers import ModelBuffers, moving_bytes
from gossamer.reducer.parameter_views import trainable
from gossamer.reducer.step_report import control_bytes
from gossamer.runtime.transport import Transport
from gossamer.strategies import AVERAGE, Stage
from gossamer.strategies.base import schedule_of
from gossamer.synchronizers.base import Synchronizer
from gossamer.synchronizers.gossip_round import HEADER_BYTES


def begun(
    model: nn.Module,
    optimizer: Optimizer | None,
    recipe: Recipe,
    fragments: Sequence[Sequence[Bucket]],
    transport: Transport,
) -> events.Attached:
    stage = recipe.strategy.stages[-1]  # the one that lasts
    buckets = [bucket for each in fragments for bucket in each]
    tensors = sum(len(bucket.parameters) for bucket in buckets)
    groups, flights = len(ModelBuffers(model)), bool(stage.apart or stage.delay)
    in_sites = stage.merging is not None and stage.averages
    return events.Attached(
        recipe=repr(recipe),
        layouts=tuple(layouts(buckets)),
        fragments=tuple(place for place, each in enumerate(fragments) for _ in each),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buffer_bytes=moving_bytes(model) if in_sites or not (flights or stage.serving) else 0,
        rider_bytes=_rider_bytes(model, optimizer, stage, fragments) if flights else (),
        control_bytes=HEADER_BYTES if stage.mixing else last_word_bytes(stage, tensors, groups),
        site_control_bytes=control_bytes(tensors, groups) if in_sites else 0,
        rank=transport.rank,
        world=transport.world,
        period=schedule_of(stage).period if stage.apart and transport.world > 1 else 1,
    )


def _rider_bytes(
    model: nn.Module, optimizer: Optimizer | None, stage: Stage, fragments: Sequence[Sequence[Bucket]]
) -> tuple[int, ...]:
    """Bytes of the state averaged with each fragment, in float32 or wider."""
    buffers = ModelBuffers(model).averaged()
    kinds = 0
    if optimizer is not None and stage.merging is not None and stage.merging.on_merge == AVERAGE:
        kinds = len(optimizer_state_keys(optimizer))
    momenta = [kinds * [p for bucket in each for p in bucket.parameters.values()] for each in fragments]
    return (averaged_bytes([*buffers, *momenta[0]]), *map(averaged_bytes, momenta[1:]))


def ended(model: nn.Module, steps: int, synchronizer: Synchronizer) -> events.Closed:
    """The digest is of what the recipe merges, where that is not the model as it is."""
    agreed, buckets = synchronizer.agreed, synchronizer.buckets
    merged = model.parameters() if agreed is None else [agreed[name] for name in sorted(agreed)]
    return events.Closed(
        steps=steps,
        digest=checkpoint.digest(merged),
        holds_merged=_holds(model, agreed or {}),
        residual_bytes=sum(bucket.residual_bytes for bucket in buckets),
        bucket_bytes=sum(bucket.flat.nbytes for bucket in buckets),
    )


def _holds(model: nn.Module, agreed: Mapping[str, Tensor]) -> bool:
    """Whether the model's own parameters are those that were agreed on, as it would hold them."""
    own = trainable(model)
    return all(torch.equal(own[name], merged.to(own[name].dtype)) for name, merged in agreed.items() if name in own)


def last_word_bytes(stage: Stage, parameter_tensors: int, buffer_groups: int) -> int:
    """Payload bytes of the report that ends a sync round; one of parameters holds nothing on gradients and buffers."""
    if stage.serving:
        return 0
    if stage.merging:
        return control_bytes(0)
    return control_bytes(parameter_tensors) if stage.delay else control_bytes(parameter_tensors, buffer_groups)


def numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Logged metrics as numbers by name. Raises TypeError for anything else."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"session.log({name}=...) was given {_shown(value)}, and records hold numbers. Write a number or a tensor "
            f"of one entry, such as session.log({name}=loss.mean())."
        ) from None


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
