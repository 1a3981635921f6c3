"""Device transport: collectives of tensors on devices, by the engine (NCCL) or by the mesh, whichever is faster there.

So a mean within a node may go by the engine, and one between nodes by the mesh. Tensors of processors go by the mesh.
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
from gossamer.comm.mesh.collective_selector import AUTO, ENGINE
from gossamer.comm.mesh.engine_selector import EngineSelector, Nodes, OperationsOnDevices, measured_ways
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.operations import Wait, is_here
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.peer_watch import Peers


@runtime_checkable
class DeviceEngine(OperationsOnDevices, Protocol):
    """An engine that says whether it moves tensors between devices itself, and how its operations hear of a loss."""

    @property
    def takes_devices(self) -> bool: ...

    def serves(self, op: SimpleOp, whole: bool) -> bool:
        """Whether it has this operation, of all ranks or of some: the same on all ranks."""

    def watched_by(self, peers: Peers) -> None:
        """From now on its operations end when one of these is gone."""

    def close(self) -> None: ...


def chooses(wish: str, devices: Sequence[str]) -> bool:
    """Whether a group takes an engine where that is faster. devices: by rank, the kinds of all."""
    return wish == AUTO and bool(devices) and "cpu" not in devices


def device_engine(engine: object) -> DeviceEngine | None:
    """An engine that moves tensors between devices itself, the same on all ranks; None for others."""
    return engine if isinstance(engine, DeviceEngine) and engine.takes_devices else None


class StagingMesh(Transport, Protocol):
    """A mesh transport, as far as there is a choice beside it."""

    @property
    def known_links(self) -> Links: ...
    @property
    def peers(self) -> Peers: ...
    def pass_over(self) -> None: ...
    def deliver(self, told: Mapping[int, Tensor], heard: Mapping[int, int]) -> dict[int, Tensor]: ...
    def close(self, why: str = "") -> None: ...
    def prefer(self, wish: str) -> None: ...


class DeviceTransport:
    """Of a group that all have a device. pick: whether the engine answers, by the mesh's links as they are now."""

    def __init__(self, mesh: StagingMesh, engine: DeviceEngine, pick: Callable[[Links], EngineSelector]) -> None:
        self._mesh, self._engine, self._pick, self._wish = mesh, engine, pick, AUTO
        self.rank, self.world = mesh.rank, mesh.world
        self._everyone: Ranks = tuple(range(mesh.world))
        engine.watched_by(mesh.peers)

    @classmethod
    def of(cls, mesh: StagingMesh, engine: DeviceEngine, device: torch.device, nodes: Nodes) -> DeviceTransport:
        """Of a mesh and an engine beside it; times both, unless the mesh's links say what that came to. All ranks call
        it."""
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
        """Begin what is asked side by side. The mesh is asked for its part at once: all is copied from the device
        before the first copy is waited for."""
        if on_mesh:
            return self._mesh.begin(Coalesced(tuple(ops)))
        waiting = [self._begin(each, ranks) for each in ops]
        return lambda: [wait() for wait in waiting]

    def _stays_on_mesh(self, op: SimpleOp | InGroup, ranks: Ranks) -> bool:
        """Of all ranks, so that these say alike."""
        return ranks == self._everyone and not isinstance(op, InGroup) and not self._by_engine(op, ranks)

    def _choose(self, op: SimpleOp, ranks: Ranks) -> Wait:
        whole = len(ranks) == self.world
        way: OperationsOnDevices = self._engine if self._by_engine(op, ranks) else self._mesh
        if way is self._engine and not whole and self._wish == AUTO:
            self._mesh.pass_over()  # other sub-groups may go by the mesh
        return way.begin(op if whole else InGroup(ranks, op))

    def _by_engine(self, op: SimpleOp, ranks: Ranks) -> bool:
        tensors = op.tensors()
        if not self._engine.serves(op, whole=len(ranks) == self.world):
            return False
        if self._wish != AUTO or is_here(tensors):
            return self._wish == ENGINE
        return self._pick(self._mesh.known_links)(sum(tensor.nbytes for tensor in tensors), ranks)

    def make_progress(self) -> bool:
        return self._mesh.make_progress()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._mesh.broadcast_(tensors, source)

    def deliver(self, told: Mapping[int, Tensor], heard: Mapping[int, int]) -> dict[int, Tensor]:
        return self._mesh.deliver(told, heard)

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
        if not self._mesh.known_links.ways:  # of a run that had no such choice
            self._mesh.links = replace(self._mesh.known_links, ways=ways).text

    def prefer(self, wish: str) -> None:
        """From now on take this collective, in this group and in its parts: between two operations, everywhere
        alike."""
        self._mesh.prefer(wish)
        self._wish = wish

    def close(self, why: str = "") -> None:
        """Leave the group, by both ways, as MeshTransport.close does. The mesh first: others wait for this rank."""
        self._mesh.close(why)
        self._engine.close()
