"""Lifecycle events: builds Attached and Closed; compares the final models of all machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe, period_of
from gossamer.algorithms.strategies import (
    NEVER,
    AveragingStage,
    FederatedStage,
    GossipStage,
    GradientStage,
    ServerStage,
    SilentStage,
    Stage,
)
from gossamer.base.differing_tensor import differing_tensor
from gossamer.base.transport import Transport
from gossamer.comm.environment import here
from gossamer.comm.environment.rendezvous import group_store
from gossamer.comm.environment.store import exchange_at_end
from gossamer.train import checkpoint
from gossamer.train.engine.averaged_state import averaged_bytes, averaged_keys
from gossamer.train.engine.bucket import Bucket, layouts
from gossamer.train.engine.frozen_parameters import FrozenParameters, flags_bytes
from gossamer.train.engine.model_buffers import ModelBuffers, moving_buffers
from gossamer.train.engine.parameter_views import state_places, trainable
from gossamer.train.engine.step_decision import control_bytes
from gossamer.train.session.startup_checks import tensor_hashes
from gossamer.train.sharding.local_shards import local_part
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.gossip_round import HEADER_BYTES


def begun(
    model: nn.Module,
    optimizer: Optimizer | None,
    recipe: Recipe,
    fragments: Sequence[Sequence[Bucket]],
    transport: Transport,
) -> events.Attached:
    stage = recipe.strategy.steady_stage
    moving = tuple(moving_buffers(model)) if stage.averages_gradients_at_once else ()
    arrays = begun_with(
        recipe,
        fragments,
        (transport.rank, transport.world),
        tensors=len(trainable(model)),
        buffer_groups=len(ModelBuffers(model)),
        frozen=len(FrozenParameters(model)),
    )
    return replace(
        arrays,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buffer_bytes=sum(moving),
        buffers=moving,
        rider_bytes=_rider_bytes(model, optimizer, stage, fragments) if stage.scheduled else (),
    )


def begun_with(
    recipe: Recipe,
    fragments: Sequence[Sequence[Bucket]],
    place: tuple[int, int],
    *,
    tensors: int,
    buffer_groups: int = 0,
    frozen: int = 0,
) -> events.Attached:
    """The event of a session with parameters in `fragments`, without a model. place: rank and world."""
    stage, (rank, world) = recipe.strategy.steady_stage, place
    buckets = [bucket for each in fragments for bucket in each]
    return events.Attached(
        recipe=repr(recipe),
        layouts=tuple(layouts(buckets)),
        fragments=tuple(place for place, each in enumerate(fragments) for _ in each),
        parameters=sum(bucket.layout.numel for bucket in buckets),
        buffer_bytes=0,
        buffers=(),
        rider_bytes=(0.0,) * len(fragments) if stage.scheduled else (),
        control_bytes=round_control_bytes(stage, tensors, buffer_groups, frozen),
        site_control_bytes=0 if stage.per_site is None else control_bytes(tensors, buffer_groups),
        rank=rank,
        world=world,
        period=period_of(recipe) if world > 1 else 1,
    )


def round_control_bytes(stage: Stage, parameter_tensors: int, buffer_groups: int, frozen: int = 0) -> int:
    """Payload bytes of the report that ends a round. A merge reports neither gradients nor buffers; its poll has flags
    for the model's `frozen` parameters."""
    match stage:
        case GradientStage():
            groups = 0 if stage.scheduled else buffer_groups
            return control_bytes(parameter_tensors, groups, by_speed=stage.follows_speed)
        case AveragingStage():
            return control_bytes(0) + flags_bytes(frozen)
        case GossipStage():
            return HEADER_BYTES
        case ServerStage() | SilentStage():
            return 0
        case FederatedStage() as stage:
            stage.refuse()
        case _:
            assert_never(stage)


def _rider_bytes(
    model: nn.Module, optimizer: Optimizer | None, stage: Stage, fragments: Sequence[Sequence[Bucket]]
) -> tuple[float, ...]:
    """Bytes of the state averaged with each fragment, in float32 or wider: per round, on average."""
    buffers = list(ModelBuffers(model).averaged().values())
    moments = stage.strategy.moments if isinstance(stage, AveragingStage) and optimizer is not None else NEVER
    rounds = averaged_keys(optimizer, moments) if optimizer is not None else {}

    def mean_bytes(along: Sequence[Tensor], fragment: Sequence[Bucket]) -> float:
        parameters = [p for bucket in fragment for p in bucket.parameters.values()]
        if isinstance(stage, AveragingStage) and stage.strategy.radial:
            along = [*along, *(parameter.detach().new_empty(1) for parameter in parameters)]  # a number per tensor
        due = [sum((turn + 1) % each == 0 for each in rounds.values()) for turn in range(moments.cycle)]
        return fmean(averaged_bytes([*along, *(count * parameters)]) for count in due)

    return tuple(mean_bytes(() if place else buffers, each) for place, each in enumerate(fragments))


def held(model: nn.Module, attached: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of model.state_dict(), or this rank's shards of them. An `attached` parameter that the model holds
    under another name, as after torch.nn.utils.prune, has its name at attach."""
    names = {id(parameter): name for name, parameter in attached.items()}
    tensors = {name: holder[leaf] for name, (holder, leaf) in state_places(model, saved=True).items()}
    return {names.get(id(tensor), name): local_part(tensor.detach()) for name, tensor in tensors.items()}


def ended(
    held: Mapping[str, Tensor],
    steps: int,
    synchronizer: Synchronizer,
    how: events.Ended = "finished",
) -> events.Closed:
    """The event of a session's end. Its digest is of all tensors in `held`, as the recipe merges them."""
    agreed, buckets = synchronizer.agreed or {}, synchronizer.buckets
    merged = {name: agreed.get(name, own) for name, own in held.items()}
    return events.Closed(
        steps=steps,
        ended=how,
        digest=checkpoint.digest(merged[name] for name in sorted(merged)),
        tensors=dict(zip(merged, tensor_hashes(merged.values()), strict=True)) if buckets else {},
        holds_merged=_holds(held, agreed),
        residual_bytes=sum(unsent.nbytes for bucket in buckets for unsent in bucket.unsent),
        bucket_bytes=sum(bucket.flat.nbytes for bucket in buckets),
    )


def _holds(own: Mapping[str, Tensor], agreed: Mapping[str, Tensor]) -> bool:
    """Whether the model's own tensors are equal to the agreed ones, in its dtypes."""
    return all(torch.equal(own[name], merged.to(own[name].dtype)) for name, merged in agreed.items() if name in own)


# -- whether ranks on all machines end with the same model -------------------------------------------------------------

_endings = count()  # number of compared sessions in this process, in the same order on every rank


def compared(closed: events.Closed, transport: Transport) -> events.Closed:
    """Add to `closed` whether the ranks on other machines ended with equal tensors, if they answer within a few
    seconds. A launcher compares the ranks of its own machine.
    """
    store = group_store()
    if store is None:  # of an elastic run, where workers have no fixed rank in a job
        return closed
    job = here()
    if job.local_world >= job.world or transport.world != job.world or closed.ended != "finished":
        return closed
    name, place = f"{next(_endings)}", (transport.rank, transport.world)
    digests = exchange_at_end(store, f"{name}/digest", *place, closed.digest)
    if digests is None or len({*digests}) == 1:
        return replace(closed, agrees=None if digests is None else True)
    texts = exchange_at_end(store, f"{name}/tensors", *place, json.dumps(dict(closed.tensors)))
    differing = None if texts is None else differing_tensor(dict(enumerate(map(json.loads, texts))))
    return replace(closed, agrees=False, differing=differing)
