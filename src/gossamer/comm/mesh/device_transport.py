"""Device transport: runs collectives of device tensors on the engine (NCCL) or the mesh, whichever is faster.

For example, a mean within a node may use the engine, and one between nodes the mesh. CPU tensors use the mesh.
The engine's part has not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gossamer.base.ops import Coalesced, CollectiveOp, InGroup, SimpleOp
from gossamer.base.transport import Transport
from gossamer.comm.device_wait import Peers
from gossamer.comm.mesh.collective_selector import AUTO, ENGINE, CollectivePrices
from gossamer.comm.mesh.engine_selector import EngineSelector, Nodes, OperationsOnDevices, measured_ways
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.operations import Wait, is_here
from gossamer.comm.mesh.program import Ranks


@runtime_checkable
class DeviceEngine(OperationsOnDevices, Protocol):
    """An engine that reports whether it moves device tensors itself, and that can be notified of lost peers."""

    @property
    def takes_devices(self) -> bool: ...

    def serves(self, op: SimpleOp, whole: bool) -> bool:
        """Whether it supports this operation, on all ranks (`whole`) or a subgroup; equal on all ranks."""

    def watched_by(self, peers: Peers) -> None:
        """From now on, end operations when one of these peers is gone."""

    def close(self) -> None: ...


def chooses(requested: str, devices: Sequence[str]) -> bool:
    """Whether a group uses the engine when it is faster. devices: device types of all ranks."""
    return requested == AUTO and bool(devices) and "cpu" not in devices


def device_engine(engine: object) -> DeviceEngine | None:
    """Return the engine if it moves device tensors itself, else None; equal on all ranks."""
    return engine if isinstance(engine, DeviceEngine) and engine.takes_devices else None


class StagingMesh(Transport, Protocol):
    """The interface of a mesh transport that DeviceTransport needs."""

    @property
    def known_links(self) -> Links: ...
    @property
    def peers(self) -> Peers: ...
    def pass_over(self) -> None: ...
    def deliver(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]: ...
    def close(self, why: str = "") -> None: ...
    def prefer(self, requested: str) -> None: ...
    @property
    def prices(self) -> CollectivePrices | None: ...
    def settle(self) -> None: ...


class DeviceTransport:
    """Transport of a group in which every rank has a device.

    Args:
        mesh: The mesh transport.
        engine: The engine of the same group.
        pick: Builds the selector from the mesh's current links.
    """

    def __init__(self, mesh: StagingMesh, engine: DeviceEngine, pick: Callable[[Links], EngineSelector]) -> None:
        self._mesh, self._engine, self._pick, self._requested = mesh, engine, pick, AUTO
        self.rank, self.world = mesh.rank, mesh.world
        self._everyone: Ranks = tuple(range(mesh.world))
        engine.watched_by(mesh.peers)

    @classmethod
    def of(cls, mesh: StagingMesh, engine: DeviceEngine, device: torch.device, nodes: Nodes) -> DeviceTransport:
        """Combine a mesh and an engine. Times both, unless the mesh's links include the result. Collective call."""
        engine.watched_by(mesh.peers)
        if not mesh.known_links.ways:
            mesh.links = replace(mesh.known_links, ways=measured_ways(mesh, engine, device, nodes)).text
        return cls(mesh, engine, lambda links: EngineSelector(links.ways, nodes))

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Wait:
        return self._begin(op, self._everyone)

    def _begin(self, op: CollectiveOp, ranks: Ranks) -> Wait:
        match op:
            case Coalesced(ops):
                runs = groupby(ops, lambda each: self._stays_on_mesh(each, ranks))
                waiting = [self._begin_run(tuple(run), ranks, on_mesh=on_mesh) for on_mesh, run in runs]
                return lambda: [answer for wait in waiting for answer in wait()]
            case InGroup(some, inner):
                return self._begin(inner, tuple(ranks[each] for each in some))
            case _:
                return self._choose(op, ranks)

    def _begin_run(self, ops: Sequence[SimpleOp | InGroup], ranks: Ranks, *, on_mesh: bool) -> Callable[[], list[Any]]:
        """Begin a run of operations. The mesh begins all of its operations at once, so that all device copies are
        queued before the first is awaited."""
        if on_mesh:
            return self._mesh.begin(Coalesced(tuple(ops)))
        waiting = [self._begin(each, ranks) for each in ops]
        return lambda: [wait() for wait in waiting]

    def _stays_on_mesh(self, op: SimpleOp | InGroup, ranks: Ranks) -> bool:
        """Whether the mesh runs it among all ranks, so that all ranks decide equally."""
        return ranks == self._everyone and not isinstance(op, InGroup) and not self._by_engine(op, ranks)

    def _choose(self, op: SimpleOp, ranks: Ranks) -> Wait:
        whole = len(ranks) == self.world
        way: OperationsOnDevices = self._engine if self._by_engine(op, ranks) else self._mesh
        if way is self._engine and not whole and self._requested == AUTO:
            self._mesh.pass_over()  # other subgroups may use the mesh
        return way.begin(op if whole else InGroup(ranks, op))

    def _by_engine(self, op: SimpleOp, ranks: Ranks) -> bool:
        tensors = op.tensors()
        if not self._engine.serves(op, whole=len(ranks) == self.world):
            return False
        if self._requested != AUTO or is_here(tensors):
            return self._requested == ENGINE
        return self._pick(self._mesh.known_links)(sum(tensor.nbytes for tensor in tensors), ranks)

    def make_progress(self) -> bool:
        return self._mesh.make_progress()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._mesh.broadcast_(tensors, source)

    def deliver(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        return self._mesh.deliver(outgoing, incoming)

    def all_gather_text(self, text: str) -> list[str]:
        return self._mesh.all_gather_text(text)

    def part(self, size: int) -> Transport:
        return self._mesh.part(size)

    @property
    def links(self) -> str:
        return self._mesh.links

    @links.setter
    def links(self, text: str) -> None:
        ways = self._mesh.known_links.ways
        self._mesh.links = text
        if not self._mesh.known_links.ways:  # of a run without timings of both
            self._mesh.links = replace(self._mesh.known_links, ways=ways).text

    @property
    def prices(self) -> CollectivePrices | None:
        """Those of the mesh."""
        return self._mesh.prices

    def settle(self) -> None:
        """End the mesh's provisional algorithms, as MeshTransport.settle."""
        self._mesh.settle()

    def prefer(self, requested: str) -> None:
        """Change the algorithm in this group and its subgroups, between two operations and equally on all ranks."""
        self._mesh.prefer(requested)
        self._requested = requested

    def close(self, why: str = "") -> None:
        """Leave the group, as MeshTransport.close. Closes the mesh first, because other ranks wait for this one."""
        self._mesh.close(why)
        self._engine.close()
