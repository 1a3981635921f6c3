"""Slices: several JAX jobs that train together, each of one or more processes, and each of them one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from gossamer.base.layout import dtype_of
from gossamer.base.runner import broadcast
from gossamer.comm.elastic.joined_run import is_elastic
from gossamer.errors import AttachError
from gossamer.integrations.jax.leaves import Leaves, part_name
from gossamer.train.sharding.model_group import ModelGroup
from gossamer.train.world_state import WorldState

HOW = (
    "jax.distributed.initialize(coordinator_address=..., num_processes=P, process_id=world.rank % P), where the ranks "
    "0 to P-1 are the first slice, P to 2P-1 the second, and so on"
)


def replicas(world: WorldState) -> Sequence[int] | None:
    """The ranks of the run that have this process's place in the other slices; None where a slice is one process.

    Raises AttachError where the run's ranks are not slices of jax.process_count() processes, in order; and for slices
    of several processes in an elastic run.
    """
    processes, place = jax.process_count(), jax.process_index()
    if processes == 1:
        return None
    if is_elastic():
        raise AttachError(
            f"rank {world.rank}: this JAX job has {processes} processes, and workers of an elastic run are single "
            "processes. The loss of one process ends its JAX job, so all processes of the slice would have to leave "
            "the run and return together. Let each slice be one process with all of its devices, or run a fixed "
            f"number: gossamer run --workers {2 * processes} --max-restarts 1."
        )
    if world.size % processes or world.rank % processes != place:
        raise AttachError(
            f"rank {world.rank} of {world.size} is process {place} of {processes} in its JAX job, and slices are ranks "
            f"in a row. Start a multiple of {processes} ranks and write {HOW}."
        )
    return tuple(range(place, world.size, processes))


class SharedParts:
    """Parts of the parameters that several processes of a slice hold. Each averages its copy with the other slices. A
    lossy recipe may round the copies differently, because each process has different other parts. The first process
    that holds a part then sends its copy to the others.
    """

    def __init__(self, leaves: Leaves, group: ModelGroup | None) -> None:
        self._group, self._shared = group, list[tuple[int, str, tuple[int, ...], Any]]()
        if group is None or all(leaf.is_whole for leaf in leaves.trained):
            return  # all processes have the same parts, and compute the same bits
        for leaf in leaves.trained:
            holders: dict[Any, set[int]] = {}
            for device, slices in leaf.sharding.devices_indices_map(leaf.shape).items():
                holders.setdefault(leaf.index(slices), set()).add(device.process_index)
            for index, processes in sorted(holders.items()):
                if len(processes) > 1:
                    shape = tuple(end - first for first, end in index)
                    name = part_name(leaf.name, None if leaf.is_whole else index)
                    self._shared.append((min(processes), name, shape, dtype_of(leaf.dtype.name)))

    def settle(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the shared ones of `tensors` with those of the first process of the slice that holds them."""
        if self._group is None:
            return
        for owner in sorted({owner for owner, *_ in self._shared}):
            remote = [each for each in self._shared if each[0] == owner]
            into = [tensors[name] if name in tensors else torch.empty(s, dtype=d) for _, name, s, d in remote]
            broadcast(self._group.training, into, owner)
