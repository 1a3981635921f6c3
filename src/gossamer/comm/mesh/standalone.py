"""Standalone mesh: a mesh transport without a process group. Its connections also carry texts."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.base.op_semantics import rank_order_mean
from gossamer.base.ops import AllGather, AllReduceMean, SimpleOp
from gossamer.base.transport import Transport
from gossamer.comm.mesh.collective_selector import ENGINE, CollectivePrices, CollectiveSelector, check_requested
from gossamer.comm.mesh.link_measurement import Links, RelayRoutes
from gossamer.comm.mesh.link_statistics import declared, parse_declarations, report_links
from gossamer.comm.mesh.long_links import fit_buffers
from gossamer.comm.mesh.native_mesh import Mesh, available
from gossamer.comm.mesh.operations import MeshOperations, Wait
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.mesh.sealing import LinksKeys
from gossamer.comm.mesh.shared_memory import share
from gossamer.comm.mesh.staged_operations import CPU
from gossamer.comm.mesh.stall_watchdog import requested_timeouts
from gossamer.comm.mesh.transport import MeshTransport, check_same_request, measured, staged_for
from gossamer.errors import GossamerError, MalformedError, require

MOST_TEXT_BYTES = 2**26  # from one rank


@dataclass(frozen=True)
class OwnRoutes:
    """How one rank is connected to the others.

    Attributes:
        here: The number of the relay on its machine; None without one.
        relayed: The number of the relay to each relayed rank.
    """

    here: int | None = None
    relayed: Mapping[int, int] = field(default_factory=dict)

    def record(self) -> list[Any]:
        """As JSON."""
        return [self.here, [*self.relayed.items()]]


DIRECT = OwnRoutes()


def standalone_mesh(
    rank: int,
    sockets: Sequence[socket.socket | None],
    requested: str,
    known: Links | None,
    *,
    gives_notice: bool,
    keys: LinksKeys | None = None,
    device: torch.device = CPU,
    prices: CollectivePrices | None = None,
    routes: OwnRoutes = DIRECT,
) -> MeshTransport:
    """Build a transport over connected sockets. Every rank of the group must call it.

    Args:
        rank: This rank.
        sockets: By rank; None at `rank`. The transport owns them, even if this call fails.
        `requested`: Requested all-reduce algorithm.
        known: The links. They are measured unless all ranks know the same ones.
        `gives_notice`: Whether this rank warns the user when a mean cannot use the requested algorithm.
        keys: Encryption keys of the connections, from sealing.agree.
        device: Device of this rank.
        prices: This rank's choices for the mesh's links, see CollectivePrices. If those of any rank are incomplete, all
            ranks use `direct` until `MeshTransport.settle`.
        routes: This rank's connections by relays.

    Raises:
        MismatchError: Ranks requested different algorithms.
        PeerLost: A rank left during the call.
    """
    mesh = None
    try:
        _check(requested)
        mesh = Mesh(rank, sockets, requested_timeouts(), keys=keys)
        texts = MeshFallback(MeshOperations(mesh, CollectiveSelector(requested, _unknown(mesh.world))))
        own = [declared(requested, fixed=False, device=device), *_knowledge(known, prices), routes.record()]
        gathered = map(json.loads, texts.all_gather_text(json.dumps(own)))
        declarations, known_by, priced, declared_routes = zip(*gathered, strict=True)
        requests, processes, devices = parse_declarations(declarations)
        check_same_request(requests)
        mesh.share(share(rank, sockets, texts.all_gather_text))
        agreed = RelayRoutes.of(
            [here for here, _ in declared_routes], [dict(relayed) for _, relayed in declared_routes]
        )
        current = None if known is None or len(set(known_by)) > 1 else known.by(agreed)
        links = current or (measured(mesh, sockets, texts, agreed) if mesh.world > 1 else _unknown(1))
        fit_buffers(rank, sockets, links)
        report_links(mesh, sockets, processes, links)
        all_priced = all(priced) and (current is None or current == known)
        provisional = prices is not None and mesh.world > 2 and not all_priced
        pick = CollectiveSelector(requested, links, gives_notice, prices, provisional)
        if prices is not None:
            prices.prepare(links)
        operations = MeshOperations(mesh, pick)
        return MeshTransport(operations, MeshFallback(operations), staged_for(operations, device, devices), devices)
    except BaseException:
        if mesh is not None:
            mesh.close()
        for each in filter(None, sockets):
            each.close()
        raise


def _check(requested: str) -> None:
    check_requested(requested)
    require(
        requested != ENGINE,
        f"{ENGINE!r} is torch's process group, which cannot lose or gain workers; an elastic run uses its own "
        "connections. Omit --collective, or write --collective auto.",
    )
    if not available():
        raise GossamerError(
            "the compiled loops are missing, and an elastic run needs them for its collectives. Build them: "
            "python kernels-src/build.py kernels; or run a fixed number of workers: gossamer run --workers 4."
        )


def _knowledge(known: Links | None, prices: CollectivePrices | None) -> tuple[str, bool]:
    """A hash of the links that this rank knows, and whether it can choose algorithms without a simulation."""
    if known is None:
        return "", prices is None or not prices.means
    return hashlib.sha256(known.text.encode()).hexdigest(), prices is None or prices.covers(known)


def _unknown(world: int) -> Links:
    return Links.alike(((0.0,) * world,) * world, 1.0)


class MeshFallback:
    """Fallback to the mesh itself: tensors that the loops cannot sum are gathered."""

    def __init__(self, operations: MeshOperations) -> None:
        self._operations = operations

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        assert isinstance(op, AllReduceMean)  # all other operations are bytes to the loops
        tensor, out = op.tensor, op.out
        wait = self._operations.begin(AllGather((tensor,)), ranks)

        def answer() -> Tensor:
            mean = rank_order_mean([remote for (remote,) in wait()])
            return mean if out is None else out.copy_(mean)

        return answer

    def all_gather_text(self, text: str) -> list[str]:
        """All-gather texts, by rank. Raises MalformedError, on every rank, if one is longer than 64 MiB."""
        own = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = torch.tensor([len(text.encode())], dtype=torch.int64, device=CPU)
        everyone = self._operations.everyone
        sizes = [int(remote) for (remote,) in self._operations.begin(AllGather((length,)), everyone)()]
        for rank, size in enumerate(sizes):
            if not 0 <= size <= MOST_TEXT_BYTES:
                raise MalformedError(
                    f"rank {rank} announced a text of {size} bytes; the limit is {MOST_TEXT_BYTES}. Nothing was "
                    "received. Send large data as tensors."
                )
        gathered = self._operations.begin_bytes(own[: sizes[self._operations.rank]], sizes)()
        return [_text(rank, remote) for rank, (remote,) in enumerate(gathered)]

    def part(self, size: int, known: Links) -> Transport:
        raise GossamerError(
            "an elastic run has no sites, because blocks of consecutive ranks would change with every worker that "
            "joins or leaves. Omit Hierarchy(...) and sites, or run a fixed number of workers: gossamer run --workers 4"
        )

    def close(self) -> None:
        """Do nothing: the mesh is closed separately."""


def _text(rank: int, data: Tensor) -> str:
    try:
        return bytes(data.numpy()).decode()
    except UnicodeDecodeError:
        raise MalformedError(f"rank {rank} sent an invalid UTF-8 text") from None
