"""Engine selection: whether an operation on device tensors uses the engine (NCCL) or the mesh with staging.

Both are timed when the group is formed, within a node and among all ranks. The decision depends only on these timings
and on the operation's size, which are equal on all ranks, so all ranks agree without communication.
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

SMALL_BYTES, LARGE_BYTES = 2**12, 2**20  # sizes of the timed means
TRIES = 3  # the fastest counts; the first may include connection setup


class OperationsOnDevices(Protocol):
    """Runs operations on device tensors."""

    world: int

    def begin(self, op: CollectiveOp) -> Wait: ...
    def answer(self, op: CollectiveOp) -> Any: ...


Nodes = tuple[str, ...]  # by rank: its machine


def nodes_of(processes: Sequence[str]) -> Nodes:
    """Extract the host names. processes: by rank, from link_statistics.process_name, which begins with the host."""
    return tuple(process.split(" ")[0] for process in processes)


@dataclass(frozen=True)
class EngineSelector:
    """Whether an operation uses the engine.

    Attributes:
        ways: Seconds of a mean of SMALL_BYTES and of LARGE_BYTES. Rows: engine and mesh among all ranks, then both
            within nodes if there are several nodes and some have several ranks.
        nodes: Machine of each rank.
    """

    ways: Matrix
    nodes: Nodes

    def __call__(self, nbytes: int, ranks: Ranks) -> bool:
        """Decide for an operation. nbytes: size of its tensors on one rank; ranks: its participants."""
        within = len(self.ways) > 2 and len({self.nodes[rank] for rank in ranks}) == 1
        engine, mesh = self.ways[2:4] if within else self.ways[:2]
        return seconds_of(nbytes, engine) <= seconds_of(nbytes, mesh)


def seconds_of(nbytes: int, timed: Sequence[float]) -> float:
    """Interpolate linearly between the timings of SMALL_BYTES and LARGE_BYTES; non-decreasing in nbytes."""
    small, large = timed
    return small + max(0.0, large - small) * (nbytes - SMALL_BYTES) / (LARGE_BYTES - SMALL_BYTES)


def measured_ways(
    mesh: Transport,
    engine: OperationsOnDevices,
    device: torch.device,
    nodes: Nodes,
    clock: Callable[[], float] = time.perf_counter,
) -> Matrix:
    """Measure EngineSelector's `ways` as the maximum over ranks. Collective call with equal results on all ranks."""
    everyone = tuple(range(mesh.world))
    groups = [everyone]
    own = tuple(rank for rank in everyone if nodes[rank] == nodes[mesh.rank])
    if 1 < len(set(nodes)) < mesh.world:
        groups.append(own)
    local = [
        [_seconds(way, device, nbytes, group, clock) for nbytes in (SMALL_BYTES, LARGE_BYTES)]
        for group in groups
        for way in (engine, mesh)
    ]
    declarations = [json.loads(text) for text in mesh.all_gather_text(json.dumps(local))]
    rows = range(len(local))
    return tuple(tuple(max(remote[row][size] for remote in declarations) for size in (0, 1)) for row in rows)


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
