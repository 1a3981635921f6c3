"""Uneven inputs: copies parameters and optimizer state to ranks that ran out of data early, at an epoch's end, and
agrees on the number of the next epoch. If ranks share a step by speed, divides the data in the same proportion.

Until then such a rank shadows the others' collectives with weight 0: `end_epoch` of its synchronizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.base.layout import dtype_name, dtype_of
from gossamer.base.units import counted
from gossamer.train import checkpoint
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.group_changes import ShardedWorld
from gossamer.train.sharding.local_shards import local_parts


def catch_up(tensors: Sequence[Tensor], parts: Sequence[Stateful], missed: int, group: GroupCalls) -> None:
    """Give ranks that missed steps the `tensors` (parameters, buffers) and `parts` (optimizer, scaler) of the first
    rank that missed none; or the fewest, if all that made the last steps have left an elastic run."""
    missed_by_rank = [int(text) for text in group.all_gather_text(str(missed))]
    fewest = min(missed_by_rank)
    if fewest and group.transport.rank == 0:
        events.notice(
            f"the last {counted(fewest, 'step')} of this epoch were made by workers that had more "
            "data and have left, and are lost with them; the epoch ends with the parameters before"
        )
    if any(missed_by_rank):
        take_over(tensors, parts, missed_by_rank.index(fewest), group)


def leave_epoch(world: ShardedWorld, group: GroupCalls, *, together: bool) -> None:
    """Agree on the number of the epoch that comes next, where all ranks come to an epoch's end together."""

    def entered() -> list[list[int]]:
        return [json.loads(text) for text in group.all_gather_text(json.dumps(world.entered_epochs()))]

    world.leave_epoch(group.together(entered) if together and not group.alone else [world.entered_epochs()])


def divide_data(world: ShardedWorld, group: GroupCalls, shares: Sequence[int]) -> None:
    """Divide the rest of the data in proportion to `shares` of a step, by rank. Called on all ranks after the same
    exchange."""
    members = tuple(group.comm_thread.members(group.transport.world))

    def parts() -> list[Any]:
        own = world.parts_in_use(group.transport.rank, group.transport.world)
        return [json.loads(text) for text in group.all_gather_text(json.dumps(own))]

    found = group.together(parts)
    if members == tuple(group.comm_thread.members(group.transport.world)):  # else parts and shares are equal again
        world.divide(shares, found, group.transport.rank)


def take_over(tensors: Sequence[Tensor], parts: Sequence[Stateful], source: int, group: GroupCalls) -> None:
    """Give all ranks the `tensors` and `parts` of rank `source`."""
    rank = group.transport.rank
    text, held = checkpoint.flatten([part.state_dict() for part in parts])
    specs = {key: _spec(tensor) for key, tensor in held.items()}
    remote = json.loads(group.all_gather_text(json.dumps({"tree": text, "tensors": specs}))[source])
    if rank != source:
        held = {key: _blank(spec) for key, spec in remote["tensors"].items()}
    group.broadcast_([*local_parts(tensors), *(held[key] for key in sorted(held))], source)
    if rank != source:
        for part, state in zip(parts, checkpoint.unflatten(remote["tree"], held), strict=True):
            part.load_state_dict(state)


def _spec(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), dtype_name(tensor.dtype), str(tensor.device.type)]


def _blank(spec: list[Any]) -> Tensor:
    shape, dtype, device = spec
    return torch.empty(shape, dtype=dtype_of(dtype), device=device)
