"""Engine selection: whether an operation on devices goes by the engine (NCCL) or by the mesh, staged.

Both are timed as the group begins, within a node and among all. One rule decides by these numbers and by how many bytes
an operation has, which are the same on all ranks: so all decide alike, and none asks the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gossamer.base.ops import AllReduceMean, CollectiveOp
from gossamer.base.transport import Transport
from gossamer.comm.mesh.link_measurement import Matrix
from gossamer.comm.mesh.operations import Wait
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.staging.device_copies import copies_for

SMALL_BYTES, LARGE_BYTES = 2**12, 2**20  # of the means that are timed
TRIES = 3  # of which the fastest counts; the first may open connections


class OperationsOnDevices(Protocol):
    """What answers operations of tensors on devices."""

    world: int

    def begin(self, op: CollectiveOp) -> Wait: ...
    def answer(self, op: CollectiveOp) -> Any: ...


Nodes = tuple[str, ...]  # by rank: the machine that it runs on


def nodes_of(processes: Sequence[str]) -> Nodes:
    """processes: by rank, as link_statistics.process_name says: the host's name first."""
    return tuple(process.split(" ")[0] for process in processes)


@dataclass(frozen=True)
class EngineSelector:
    """Whether the engine answers. ways: seconds of a mean of SMALL_BYTES and of LARGE_BYTES, a row each for the engine
    and for the mesh among all ranks, then for both within nodes where some have several ranks and some are apart."""

    ways: Matrix
    nodes: Nodes

    def __call__(self, nbytes: int, ranks: Ranks) -> bool:
        """nbytes: of the operation's tensors on any rank; ranks: those that take part."""
        within = len(self.ways) > 2 and len({self.nodes[rank] for rank in ranks}) == 1
        engine, mesh = self.ways[2:4] if within else self.ways[:2]
        return seconds_of(nbytes, engine) <= seconds_of(nbytes, mesh)


def seconds_of(nbytes: int, timed: Sequence[float]) -> float:
    """On the line through what was timed; never less for more bytes. timed: of SMALL_BYTES and of LARGE_BYTES."""
    small, large = timed
    return small + max(0.0, large - small) * (nbytes - SMALL_BYTES) / (LARGE_BYTES - SMALL_BYTES)


def measured_ways(
    mesh: Transport,
    engine: OperationsOnDevices,
    device: torch.device,
    nodes: Nodes,
    clock: Callable[[], float] = time.perf_counter,
) -> Matrix:
    """EngineSelector's ways: the slowest rank's. All ranks call it at once, and come to the same answer."""
    everyone = tuple(range(mesh.world))
    groups = [everyone]
    own = tuple(rank for rank in everyone if nodes[rank] == nodes[mesh.rank])
    if 1 < len(set(nodes)) < mesh.world:
        groups.append(own)
    mine = [
        [_seconds(way, device, nbytes, group, clock) for nbytes in (SMALL_BYTES, LARGE_BYTES)]
        for group in groups
        for way in (engine, mesh)
    ]
    told = [json.loads(text) for text in mesh.all_gather_text(json.dumps(mine))]
    rows = range(len(mine))
    return tuple(tuple(max(theirs[row][size] for theirs in told) for size in (0, 1)) for row in rows)


def _seconds(
    way: OperationsOnDevices, device: torch.device, nbytes: int, group: Ranks, clock: Callable[[], float]
) -> float:
    x = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    op = AllReduceMean(x, x)
    taken = []
    for _ in range(TRIES):
        began = clock()
        way.answer(op if len(group) == way.world else op.within(group))
        copies_for(device).mark().await_here()
        taken.append(clock() - began)
    return min(taken)
