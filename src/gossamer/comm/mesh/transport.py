"""Mesh transport: collectives over the mesh's own TCP connections; a fallback handles unsupported operations."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.collectives import DirectAllReduce
from gossamer.base.ops import AllReduceMean, Coalesced, CollectiveOp, InGroup, SimpleOp
from gossamer.base.transport import Transport
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, Meter, current, meter_of
from gossamer.comm.device_wait import Peers
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.mesh.collective_selector import (
    AUTO,
    ENGINE,
    CollectivePrices,
    CollectiveSelector,
    check_requested,
    prefer_collective,
)
from gossamer.comm.mesh.connect import connect
from gossamer.comm.mesh.device_transport import DeviceTransport, chooses, device_engine
from gossamer.comm.mesh.engine_selector import nodes_of
from gossamer.comm.mesh.link_measurement import Links, RelayRoutes, measure
from gossamer.comm.mesh.link_statistics import declared, parse_declarations, report_links
from gossamer.comm.mesh.long_links import fit_buffers
from gossamer.comm.mesh.native_mesh import Mesh, available
from gossamer.comm.mesh.operations import MeshOperations, Wait, is_here
from gossamer.comm.mesh.program import FORMATS, Ranks
from gossamer.comm.mesh.shared_memory import share
from gossamer.comm.mesh.staged_operations import CPU, StagedOperations
from gossamer.comm.mesh.stall_watchdog import requested_timeouts
from gossamer.comm.mesh.tcp_info import packets
from gossamer.comm.staging.chunk_tables import PART_CHUNKS
from gossamer.errors import ConnectError, GossamerError, MismatchError


def mesh_transport(
    engine: Transport, address: str, requested: str = AUTO, known: Links | None = None, device: torch.device = CPU
) -> Transport:
    """Build a mesh for the engine's group. Every rank must call it.

    The engine alone is returned if any rank requests it or lacks the compiled loops, or if workers cannot connect.

    Args:
        engine: Transport of the group.
        address: Local address to listen on.
        `requested`: Requested all-reduce algorithm.
        known: The group's links; measured if None.
        device: Device of this rank. If every rank has a GPU and the engine accepts its tensors, both are timed, and
            "auto" uses the faster one.

    Raises:
        MismatchError: Ranks requested different algorithms, or have different tokens.
    """
    check_requested(requested)
    patience = requested_timeouts()
    if engine.world == 1:
        return engine
    declarations = engine.all_gather_text(declared(requested if available() else ENGINE, device=device))
    requests, processes, devices = parse_declarations(declarations)
    if ENGINE in requests:
        refuse_unlimited("a rank uses the process group's own collectives")
        return engine
    check_same_request(requests)
    try:
        sockets = connect(engine.rank, engine.world, address, engine.all_gather_text, run_token() or b"")
    except ConnectError as error:
        refuse_unlimited(str(error))
        if engine.rank == 0:
            events.notice(f"{error}: using the engine's own collectives, which are slower on slow links")
        return engine
    mesh = Mesh(engine.rank, sockets, patience, share(engine.rank, sockets, engine.all_gather_text))
    meter = next(filter(None, (meter_of(each) for each in sockets if each is not None)), None)
    again = partial(mesh_transport, address=address, requested=requested, device=device)
    fallback = EngineFallback(engine, again, meter)
    links = known or measured(mesh, sockets, fallback)
    fit_buffers(mesh.rank, sockets, links)
    report_links(mesh, sockets, processes, links)
    pick = CollectiveSelector(requested, links, gives_notice=engine.rank == 0)
    operations = MeshOperations(mesh, pick, advice(engine.rank))
    made = MeshTransport(operations, fallback, staged_for(operations, device, devices))
    devices_engine = device_engine(engine) if chooses(requested, devices) else None
    if devices_engine is not None:
        refuse_unlimited("tensors of GPUs travel by NCCL")
    return made if devices_engine is None else DeviceTransport.of(made, devices_engine, device, nodes_of(processes))


def refuse_unlimited(why: str) -> None:
    """Raise GossamerError if this machine has bandwidth limits, which apply to the mesh only."""
    if current() is not None:
        raise GossamerError(
            f"{why}, and bandwidth limits do not apply to them. Write --collective ring, or leave out --upload-limit, "
            "--download-limit and --daily-cap."
        )


def staged_for(operations: MeshOperations, device: torch.device, devices: Sequence[str]) -> StagedOperations:
    """Staging for device tensors. device: of this rank; devices: device types by rank."""
    return StagedOperations(operations, home=device, everything=set(devices) != {CPU.type})


def advice(rank: int) -> str:
    """Remedy for the user of a fixed group that broke, from rank `rank`."""
    return (
        f" Check that rank's output for the reason. If it only ended its session while rank {rank} continued, stop all "
        "ranks together: session.request_stop(). If ranks run out of data at different times, write `with "
        "session.epoch():` around the loop over batches."
    )


def check_same_request(requests: Sequence[str]) -> None:
    """Raise MismatchError unless all ranks requested the same algorithm. `requests`: by rank."""
    if len(set(requests)) > 1:
        raise MismatchError(
            f"the ranks requested different collectives ({', '.join(requests)}, by rank), so they would wait for each "
            "other's messages forever. Pass the same --collective, or the same recipe, to all of them."
        )


def measured(
    mesh: Mesh, sockets: Sequence[socket.socket | None], fallback: Fallback, routes: RelayRoutes | None = None
) -> Links:
    """Measure the links between the ranks of a mesh; every rank must call it. routes: see `measure`."""
    unknown = Links.alike(((0.0,) * mesh.world,) * mesh.world, 1.0)
    transport = MeshTransport(MeshOperations(mesh, CollectiveSelector(DirectAllReduce(), unknown)), fallback)
    return measure(transport, mesh.round_trips(), lambda: packets(sockets), routes)


class Fallback(Protocol):
    """Serves a mesh's group where the compiled loops cannot: texts, other formats, subgroups."""

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        """Begin an operation on a subgroup. Peers in `op` are indices into `ranks`."""

    def all_gather_text(self, text: str) -> list[str]: ...

    def part(self, size: int, known: Links) -> Transport:
        """Return a transport of this rank's block of `size` consecutive ranks. known: the links between them."""

    def close(self) -> None: ...


class EngineFallback:
    """Fallback to the transport that formed the group.

    Args:
        engine: the transport. Its sockets are not accessible.
        again: builds a mesh over a part of the group with known links.
        meter: of bandwidth limits; None without. An operation begins once the bytes of earlier ones are due.
    """

    def __init__(self, engine: Transport, again: Callable[..., Transport], meter: Meter | None = None) -> None:
        self._engine, self._again, self._meter = engine, again, meter

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        if self._meter is not None:
            _delay(self._meter, sum(tensor.nbytes for tensor in op.tensors()), len(ranks))
        return self._engine.begin(InGroup(ranks, op) if len(ranks) < self._engine.world else op)

    def all_gather_text(self, text: str) -> list[str]:
        return self._engine.all_gather_text(text)

    def part(self, size: int, known: Links) -> Transport:
        return self._again(self._engine.part(size), known=known)

    def close(self) -> None:
        self._engine.close()


def _delay(meter: Meter, nbytes: int, world: int) -> None:
    """Wait until bandwidth limits allow an operation, and count it: a ring sends twice the share of all other ranks."""
    for way in (UP, DOWN):
        while not meter.room(way):
            time.sleep(meter.wait_seconds(way))
        meter.transferred(way, 2 * nbytes * (world - 1) // world)


class MeshTransport:
    """Collective operations over a mesh, with a fallback for those that its compiled loops do not support.

    Args:
        operations: The mesh's operations.
        fallback: Serves other operations.
        staged: Staging for device tensors, if not the default.
        devices: Device types by rank, if known.
    """

    def __init__(
        self,
        operations: MeshOperations,
        fallback: Fallback,
        staged: StagedOperations | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        self.devices = tuple(devices)
        self._operations, self._fallback, self._mesh = operations, fallback, operations.mesh
        self._staged = staged or StagedOperations(operations)
        self._parts: list[Transport] = []
        self.rank, self.world = operations.rank, operations.world
        self.make_progress = self._mesh.make_progress

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Wait:
        return self._ready(op, self._operations.everyone)()

    def _ready(self, op: CollectiveOp, ranks: Ranks) -> Callable[[], Wait]:
        """Return a function that begins an operation. Peers in `op` are indices into `ranks`. For a group of
        operations, which may contain groups, all device tensors are copied before the first operation begins."""
        match op:
            case Coalesced(ops):
                return partial(_all_begun, [self._ready(each, ranks) for each in ops])
            case InGroup(some, inner):
                return self._ready(inner, tuple(ranks[each] for each in some))
            case _ if self._staged.everything or not is_here(op.tensors()):
                return self._staged.ready(op, ranks)
            case AllReduceMean(tensor) if tensor.dtype not in FORMATS:
                return partial(self._fallback.begin, op, ranks)
            case _:
                return partial(self._operations.begin, op, ranks)

    def pass_over(self) -> None:
        """Issue empty operations, so that operation numbers stay equal while other subgroups use the mesh."""
        for wait in [self._operations.begin_nothing() for _ in range(PART_CHUNKS)]:
            wait()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        staged = self._staged.everything or not is_here([each for each in tensors if each.numel()])
        (self._staged if staged else self._operations).broadcast_(tensors, source)

    def deliver(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Send the uint8 tensor `outgoing[j]` to rank j, and receive `incoming[j]` bytes from rank j, directly.

        Every rank calls it at the same point, and the sizes of every pair of ranks must match.
        """
        return self._operations.deliver(outgoing, incoming)

    def all_gather_text(self, text: str) -> list[str]:
        return self._fallback.all_gather_text(text)

    def part(self, size: int) -> Transport:
        first = self.rank - self.rank % size
        known = self._operations.pick.links.among(range(first, first + size))
        self._parts.append(self._fallback.part(size, known))
        return self._parts[-1]

    @property
    def peers(self) -> Peers:
        """All other ranks, for checks of their connections without an operation."""
        return self._operations

    @property
    def known_links(self) -> Links:
        """The links that `links` encodes."""
        return self._operations.pick.links

    @property
    def links(self) -> str:
        return self.known_links.text

    @links.setter
    def links(self, text: str) -> None:
        if not text or len((known := Links.of(text)).round_trips) != self.world:
            return  # links of another group
        self._operations.pick.links = known
        for part in self._parts:
            first = self.rank - part.rank
            part.links = known.among(range(first, first + part.world)).text

    @property
    def prices(self) -> CollectivePrices | None:
        """The choices of algorithms in advance, if this group has them."""
        return self._operations.pick.prices

    def settle(self) -> None:
        """End the provisional algorithms, between two operations and equally on all ranks."""
        self._operations.pick.settle()

    def prefer(self, requested: str) -> None:
        """Change the algorithm in this group and its subgroups, between two operations and equally on all ranks."""
        self._operations.pick.prefer(requested)
        for part in self._parts:
            prefer_collective(part, requested)

    def close(self, why: str = "") -> None:
        """Leave the group. Thread-safe: an operation on which another thread waits raises PeerLost with `why`."""
        for part in self._parts:
            part.close()
        self._mesh.close(why)
        self._fallback.close()


def _all_begun(begins: Sequence[Callable[[], Wait]]) -> Wait:
    """Begin operations in order. The returned function waits for all in that order, and returns their results."""
    waiting = [begin() for begin in begins]
    return lambda: [wait() for wait in waiting]
