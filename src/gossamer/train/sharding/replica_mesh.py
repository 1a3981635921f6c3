"""Replica mesh: finds the ranks that hold the same part of the model from one dimension of a DeviceMesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import ALIGN, RESET, AveragingStage, Stage
from gossamer.errors import AttachError
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.moments.take_over import ownership
from gossamer.train.sharding.local_shards import sharded_parameters

HOW = (
    'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), and then gossamer.attach(..., '
    'mesh=mesh["replicate"])'
)


class DeviceMesh(Protocol):
    """The part of torch.distributed.device_mesh.DeviceMesh that is used here."""

    @property
    def ndim(self) -> int: ...
    def get_coordinate(self) -> Any: ...
    def get_group(self) -> Any: ...


def replica_ranks(mesh: DeviceMesh, world: int) -> tuple[int, ...]:
    """The ranks of the job that hold the same part of the model as this one, ascending.

    Args:
        world: the size of the job.

    Raises:
        AttachError: the mesh is invalid.
    """
    if not callable(getattr(mesh, "get_coordinate", None)):
        raise AttachError(f"mesh={mesh!r} is not a DeviceMesh. Write {HOW}.")
    if mesh.ndim != 1:
        raise AttachError(
            f"mesh= has {mesh.ndim} dimensions, but the recipe runs along one, between replicas. Select it by its "
            f"name: {HOW}."
        )
    if mesh.get_coordinate() is None:
        raise AttachError(
            f"this rank is not in the mesh, so it has no replicas. Make one mesh of all ranks of the job: {HOW}."
        )
    if not dist.is_initialized() or dist.get_world_size() != world:
        raise AttachError(
            f"this job has {world} workers, but the mesh is of another process group with other ranks. Call "
            f"world = gossamer.init() first, then make the mesh of world.size ranks: {HOW}."
        )
    return tuple(sorted(dist.get_process_group_ranks(mesh.get_group())))


def refuse_overlap(groups: Sequence[Sequence[int]], world: int) -> None:
    """Raise AttachError unless the ranks of the job fall into groups of one size. The same on every rank."""
    if len({*map(len, groups)}) > 1 or sorted(chain(*groups)) != [*range(world)]:
        raise AttachError(
            f"the ranks of the job passed meshes of the ranks {', '.join(map(str, groups))}, but each rank must be in "
            f"one, all of the same size. Take all from one mesh of the whole job: {HOW}."
        )


def refuse_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Raise AttachError for a recipe that cannot run within a group of ranks, or that needs optimizer state of whole
    parameters for sharded ones."""
    refuse_apart(recipe)
    sharded = sharded_parameters(model)
    if owned := ownership(recipe.compressor, trainable(model)) if sharded else ():
        raise AttachError(
            f"{recipe.compressor!r} applies the optimizer's momentum of {', '.join(owned)}, but the optimizer keeps it "
            "for DTensors. Use a compressor without momentum, such as TopK(density=0.01) or PowerSGD(rank=2)."
        )
    if sharded and any(map(_moves_moments, recipe.strategy.stages)):
        raise AttachError(
            f"{recipe!r} averages or resets the optimizer's state, but the optimizer keeps it for DTensors. "
            'Leave it local to each worker: optimizer_state="keep".'
        )


def refuse_apart(recipe: Recipe) -> None:
    """Raise AttachError for a recipe that cannot run within a group of ranks."""
    if not all(stage.in_lock_step for stage in recipe.strategy.stages):
        raise AttachError(
            f"{recipe!r} has workers that contact single peers by their ranks in the job, but with a model divided "
            "among ranks the recipe runs in several groups at once. Use one in lock step, such as EveryStep(), "
            "DiLoCo(period=20) or Gossip()."
        )
    if any(stage.follows_speed for stage in recipe.strategy.stages):
        raise AttachError(
            f"{recipe!r} derives shares from measured times, but with a model divided among ranks each group of ranks "
            "would measure its own, and the parts of one replica would need the same samples. Leave out balance=True."
        )


def _moves_moments(stage: Stage) -> bool:
    return isinstance(stage, AveragingStage) and (
        stage.strategy.moments.any or stage.strategy.on_merge in (ALIGN, RESET)
    )


def refuse_unsharded(model: nn.Module) -> None:
    """Raise AttachError for a parameter that was not passed to fully_shard while others were."""
    if not any(callable(getattr(module, "reshard", None)) for module in model.modules()):
        return
    for name in trainable(model).keys() - sharded_parameters(model).keys():
        raise AttachError(
            f'"{name}" is in no module passed to fully_shard, so its gradient is not averaged within a replica. '
            'Shard the whole model at last: fully_shard(model, mesh=mesh["shard"]).'
        )


def refuse_inner_replicas(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise AttachError if a parameter's own mesh has other ranks that the recipe would average with as well."""
    for name, parameter in sharded_parameters(model).items():
        mesh: Any = parameter.device_mesh
        others = sorted({*mesh.mesh.flatten().tolist()} & {*ranks})
        if len(others) > 1:
            raise AttachError(
                f'"{name}" is a DTensor over ranks {others}, among which the recipe runs as well, so its gradient '
                "would be averaged twice, and once uncompressed. Leave this dimension out inside: "
                'fully_shard(model, mesh=mesh["shard"]), parallelize_module(model, mesh["tp"], plan).'
            )
