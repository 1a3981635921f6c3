"""Encrypted mesh: a mesh transport with encrypted connections that carry all traffic of the group.

Keys are agreed inside TLS if the run has certificates (sealing), and else during the handshakes of the connections
(key_exchange).

The engine is only used to form the group: ranks find each other over its channel. Texts, staged GPU tensors and formats
that the loops cannot sum use the mesh. Messages between workers on one machine are unencrypted in shared memory: a
process that can read that memory can also read the memory of the workers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from gossamer.base.ops import SimpleOp
from gossamer.base.transport import Transport
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.mesh.collective_selector import AUTO, ENGINE, CollectiveSelector, check_requested
from gossamer.comm.mesh.connect import connect, hang_up
from gossamer.comm.mesh.key_exchange import LinkKeyExchange
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.link_statistics import declared, parse_declarations, report_links
from gossamer.comm.mesh.long_links import fit_buffers
from gossamer.comm.mesh.native_mesh import Mesh, available
from gossamer.comm.mesh.operations import MeshOperations, Wait
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.mesh.sealing import LinkKeys, LinksKeys, agree_group, group_context
from gossamer.comm.mesh.shared_memory import share
from gossamer.comm.mesh.staged_operations import CPU
from gossamer.comm.mesh.stall_watchdog import requested_timeouts
from gossamer.comm.mesh.standalone import MeshFallback
from gossamer.comm.mesh.transport import MeshTransport, advice, check_same_request, measured, staged_for
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError

# Suffixes of the requested algorithm, so that ranks detect if only some of them encrypt
OVER_TLS, SEALED = " over TLS", " sealed"


def encrypted_mesh(
    engine: Transport,
    address: str,
    tls: Tls | None,
    requested: str = AUTO,
    known: Links | None = None,
    device: torch.device = CPU,
) -> Transport:
    """Build a mesh with encrypted connections for the engine's group. All ranks call it.

    It never falls back to unencrypted transport.

    Args:
        engine: Transport of the group.
        address: Local address to listen on.
        tls: Contexts from mesh_tls; None to agree on keys without certificates.
        `requested`: Requested all-reduce algorithm.
        known: The group's links; measured if None.
        device: Device of this rank.

    Raises:
        ConnectError: A rank requested the engine or lacks the compiled loops, or two workers cannot connect or agree
            on keys.
        MismatchError: Ranks requested different algorithms, only some encrypt, or tokens differ.
    """
    check_requested(requested)
    patience = requested_timeouts()
    if engine.world == 1:
        return engine
    rank, suffix = engine.rank, SEALED if tls is None else OVER_TLS
    declarations = engine.all_gather_text(declared((requested if available() else ENGINE) + suffix, device=device))
    requests, processes, devices = parse_declarations(declarations)
    check_same_request(requests)
    if ENGINE + suffix in requests:
        raise ConnectError(
            "this run encrypts, but torch's own collectives do not: they were requested, or the compiled loops, which "
            f"encrypt, are missing. Omit --collective {ENGINE} and build the loops (python kernels-src/build.py "
            f"kernels); or, on a network of your own, {'write --plaintext' if tls is None else 'omit --tls'}."
        )
    token = run_token() or b""
    with ExitStack() as failing:
        sockets, keys = _connected(engine, address, tls, token)
        failing.callback(hang_up, sockets)
        mesh = Mesh(rank, sockets, patience, keys=keys)
        failing.callback(mesh.close)
        unknown = Links.alike(((0.0,) * mesh.world,) * mesh.world, 1.0)
        operations = MeshOperations(mesh, CollectiveSelector(requested, unknown), advice(rank))
        again = partial(encrypted_mesh, address=address, tls=tls, requested=requested, device=device)
        fallback = EncryptedFallback(MeshFallback(operations), engine, again)
        mesh.share(share(rank, sockets, fallback.all_gather_text))
        links = known or measured(mesh, sockets, fallback)
        fit_buffers(rank, sockets, links)
        report_links(mesh, sockets, processes, links)
        operations.pick = CollectiveSelector(requested, links, gives_notice=rank == 0)
        failing.pop_all()
    return MeshTransport(operations, fallback, staged_for(operations, device, devices))


def _connected(
    engine: Transport, address: str, tls: Tls | None, token: bytes
) -> tuple[list[socket.socket | None], LinksKeys]:
    """Connect all ranks. Returns sockets and keys by rank."""
    rank, gather = engine.rank, engine.all_gather_text
    if tls is not None:
        sockets = connect(rank, engine.world, address, gather, token)
        return sockets, agree_group(rank, sockets, tls, token, gather)
    keys: dict[int, LinkKeys] = {}
    exchange = LinkKeyExchange(rank, group_context(gather), keys)
    return connect(rank, engine.world, address, gather, token, exchange), keys


class EncryptedFallback:
    """Fallback to the mesh itself. The engine does not encrypt, so it is only used to split the group.

    again: builds an encrypted mesh over a part of the group with known links.
    """

    def __init__(self, mesh: MeshFallback, engine: Transport, again: Callable[..., Transport]) -> None:
        self._mesh, self._engine, self._again = mesh, engine, again

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        return self._mesh.begin(op, ranks)

    def all_gather_text(self, text: str) -> list[str]:
        return self._mesh.all_gather_text(text)

    def part(self, size: int, known: Links) -> Transport:
        return self._again(self._engine.part(size), known=known)

    def close(self) -> None:
        self._engine.close()
