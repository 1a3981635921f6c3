"""Peer endpoints: opens this process's endpoints, finds the addresses of workers or servers, and monitors servers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from gossamer.base.host_port import Address
from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerScript,
    stopped_seconds,
)
from gossamer.base.spans import active
from gossamer.base.spans.record_format import Untraced
from gossamer.comm.environment.run_settings import (
    LARGEST_FRAME_BYTES,
    dedicated_servers,
    is_elastic,
    own_address,
    run_name,
)
from gossamer.comm.environment.run_token import TOKEN_BYTES, run_token
from gossamer.comm.environment.wait_progress import NOTICE_SECONDS
from gossamer.comm.environment.wait_timeout import VARIABLE, duration, timeout_seconds
from gossamer.comm.environment.worker_registry import publish, published
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.runtime.peer_thread import PeerEndpoint, RunningScript
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.comm.tls_contexts import run_tls, seals
from gossamer.errors import ConnectError, GossamerError, PeerLost
from gossamer.events import notice
from gossamer.train.parameter_server.server import host

DEAD_AFTER_SECONDS = 5.0
LATE_SECONDS = 5.0  # until a notice that a server has not joined
RESTART_SECONDS = 60.0  # for a lost server: the launcher restarts it, and reading a large journal takes time
SLACK_BYTES = 2**20  # in a frame, for names and shapes in addition to tensors
NOT_SEALED = (
    "this run encrypts because it leaves one machine, and without certificates only lock step can: messages to servers "
    "or to single workers would be readable on the way. Add --tls FOLDER; or, on a network of your own, "
    "--private-network 10.0.0.0/8 with its address, or --plaintext."
)

AllGatherText = Callable[[str], list[str]]  # all-gathers a text: returns the texts of all workers, by rank


@dataclass
class PeerEndpoints:
    """This worker's endpoint, and that of the server in this process, if any."""

    me: PeerEndpoint
    servers: int  # number of servers
    part_bytes: int  # largest shard of a server, which receives it in one message
    server: PeerEndpoint | None  # the server of this process
    service: RunningScript | None  # its script

    @property
    def local_server(self) -> Peer | None:
        return None if self.server is None else self.server.me

    def bytes_served(self) -> int:
        """Payload bytes that the server in this process has sent to other workers."""
        if self.server is None:
            return 0
        traffic = self.server.statistics()
        return sum(each.payload_bytes_sent for peer, each in traffic.items() if peer.number != self.me.me.number)

    def drain(self, shards: int) -> None:
        """Disconnect; a server in this process serves until all other workers have disconnected.

        shards: number of servers that hold parameters; a model with fewer rows than servers leaves some without.
        """
        self.me.close()
        if self.server is not None and self.server.me.number >= shards:
            self.server.close()
        elif self.service is not None:
            self.service.wait()

    def close(self) -> None:
        """Close at once, even if peers are connected."""
        self.me.close()
        if self.server is not None:
            self.server.close()


def connect_to_servers(
    rank: int, world: int, servers: int | None, largest_bytes: int, all_gather_text: AllGatherText
) -> PeerEndpoints:
    """Open this worker's endpoint, and that of a server on this worker if workers host servers.

    Args:
        servers: number of servers; None for all dedicated ones, or one per worker.
        largest_bytes: total size of the tensors in one message.
        all_gather_text: not called if servers are dedicated and the launcher made a token.

    Raises:
        ConnectError: the endpoint could not be opened.
    """
    dedicated = dedicated_servers()
    if dedicated and active.recorder is not None:
        active.recorder.lacks(Untraced.SERVERS)
    count = min(servers or len(dedicated) or world, len(dedicated) or world)
    token = run_token() or _agreed_token(all_gather_text)
    frame_bytes = LARGEST_FRAME_BYTES if dedicated else largest_bytes + SLACK_BYTES
    open_endpoint = _opener(token, frame_bytes)
    me, server = open_endpoint(Peer(WORKER, rank)), None
    if not dedicated and rank < count:
        server = open_endpoint(Peer(SERVER, rank))
    service = None if server is None else server.start(_serve(server))
    addresses = _of_kind(
        SERVER, dict(enumerate(dedicated[:count])) if dedicated else _all_addresses(all_gather_text, server)
    )
    me.meet(addresses)
    me.start(watch_servers(me, addresses, RESTART_SECONDS if dedicated else 0.0))
    return PeerEndpoints(me, count, frame_bytes - SLACK_BYTES, server, service)


def connect_workers(
    rank: int, largest_bytes: int, all_gather_text: AllGatherText, *, asks_end_with_peer: bool = False
) -> PeerEndpoint:
    """Open this worker's endpoint, with the addresses of all other workers.

    Args:
        largest_bytes: as in `connect_to_servers`.
        asks_end_with_peer: requests to a lost worker raise PeerLost, for work that cannot continue without it.
    """
    _meets_in_pairs()
    token = run_token() or _agreed_token(all_gather_text)
    me = _opener(token, largest_bytes + SLACK_BYTES, asks_end_with_peer)(Peer(WORKER, rank))
    publish(rank, me.address)
    me.meet(_of_kind(WORKER, _all_addresses(all_gather_text, me)))
    return me


def _meets_in_pairs() -> None:
    if active.recorder is not None:
        active.recorder.lacks(Untraced.PAIRS)


def reconnect_worker(rank: int, world: int, largest_bytes: int) -> PeerEndpoint:
    """As connect_workers, for one worker that returns. The launcher's store has the addresses of the others; they
    receive this worker's address through `relocate`. Raises ConnectError."""
    _meets_in_pairs()
    token = run_token()
    if token is None:
        raise ConnectError(
            f"worker {rank} restarted without the run's token, so its peers would reject it. Start the run by "
            "`gossamer run`, which passes the token on."
        )
    me = _opener(token, largest_bytes + SLACK_BYTES)(Peer(WORKER, rank))
    publish(rank, me.address)  # first, so that of two workers that return together, one finds the other
    me.meet(_of_kind(WORKER, published(world)))
    return me


def relocate(me: PeerEndpoint, peer: Peer, where: str) -> None:
    """Store the address of a worker that returned; an invalid text changes nothing."""
    with suppress(ValueError, TypeError, ConnectError):
        host, port = json.loads(where)
        me.meet({peer: (str(host), int(port))})


class Closes(Protocol):
    def close(self) -> None:
        """Close at once, even if peers are connected."""


class Watched(Protocol):
    me: Peer

    def close(self, why: GossamerError) -> None:
        """Close at once; pending requests raise `why`."""


def close_now(endpoints: Closes, process: int) -> None:
    """Close in the process that opened them; a forked child does nothing."""
    if os.getpid() == process:
        endpoints.close()


def _opener(token: bytes, largest_bytes: int, asks_end_with_peer: bool = False) -> Callable[[Peer], PeerEndpoint]:
    tls = run_tls()

    def opened(peer: Peer) -> PeerEndpoint:
        if (simulated := current_worker().endpoint(peer)) is not None:
            return simulated
        if seals():
            raise ConnectError(NOT_SEALED)
        # Without a recipe: workers compared theirs; a server receives it from the first one and compares the others'.
        return TcpEndpoint(
            Credentials(me=peer, token=token, run=run_name(), largest_frame_bytes=largest_bytes),
            EndpointOptions(
                address=own_address(),
                dead_after_seconds=DEAD_AFTER_SECONDS,
                asks_end_with_peer=asks_end_with_peer,
                tls=tls,
            ),
        )

    return opened


def _agreed_token(all_gather_text: AllGatherText) -> bytes:
    """Rank 0's token, sent through the process group, which trusts its network."""
    return bytes.fromhex(all_gather_text(secrets.token_hex(TOKEN_BYTES))[0])


def _all_addresses(all_gather_text: AllGatherText, own: PeerEndpoint | None) -> Mapping[int, Address]:
    """Addresses of the ranks' endpoints; ranks without one are missing."""
    texts = all_gather_text(json.dumps(None if own is None else own.address))
    found = [json.loads(text) for text in texts]
    return {rank: (address[0], int(address[1])) for rank, address in enumerate(found) if address is not None}


def _of_kind(kind: str, addresses: Mapping[int, Address]) -> dict[Peer, Address]:
    return {Peer(kind, number): address for number, address in addresses.items()}


def _serve(endpoint: PeerEndpoint) -> PeerScript:
    """Run the server at `endpoint`. If it fails, close the endpoint; otherwise workers would wait forever."""
    try:
        yield from host(endpoint.me.number)
    except PeerLost:  # the endpoint was closed
        raise
    except Exception as error:
        notice(f"{endpoint.me} failed: {error!r}")
        endpoint.close()
        raise


def watch_servers(endpoint: Watched, addresses: Mapping[Peer, Address], patience_seconds: float) -> PeerScript:
    """Close the endpoint with an error if a server never joins or is lost for good; requests would wait forever.

    A notice names servers that have not joined within LATE_SECONDS, and on worker 0 again every ten seconds; an error
    names those that have not joined within GOSSAMER_TIMEOUT.

    Args:
        addresses: of the servers.
        patience_seconds: time for a lost server to return.
    """
    missing, lost_until = dict(addresses), dict[Peer, float]()
    event: PeerEvent = yield Await(until=-inf)
    began = event.moment
    notice_at, refuse_at = began + LATE_SECONDS, began + timeout_seconds()
    while True:
        match event:
            case PeerLeft(peer=peer, moment=moment) if peer.kind == SERVER:
                lost_until[peer] = moment + patience_seconds
            case PeerJoined(peer=peer):
                lost_until.pop(peer, None)
                missing.pop(peer, None)
            case Elapsed(moment=moment):
                if lost := ", ".join(str(peer) for peer, until in lost_until.items() if until <= moment):
                    notice(f"{lost} did not return, so its parameters are lost")
                    endpoint.close(PeerLost(f"{lost} did not return, so its parameters are lost."))
                    return
                if missing and moment >= refuse_at:
                    endpoint.close(_never_joined(endpoint.me, missing))
                    return
                if missing and moment >= notice_at:
                    notice(_not_joined_yet(endpoint.me, missing, moment - began))
                    notice_at = moment + NOTICE_SECONDS if endpoint.me.number == 0 else inf
        deadlines = [*lost_until.values(), *((notice_at, refuse_at) if missing else ())]
        since, until = event.moment, min(deadlines, default=None)
        event = yield Await(until=until)
        if stopped := stopped_seconds(event, since, until):
            notice_at, refuse_at = notice_at + stopped, refuse_at + stopped
            lost_until = {peer: moment + stopped for peer, moment in lost_until.items()}


def _not_joined_yet(me: Peer, missing: Mapping[Peer, Address], seconds: float) -> str:
    return (
        f"{_called(me)} has waited for {_where(missing)} for {duration(round(seconds))}, of "
        f"{duration(timeout_seconds())} at most ({VARIABLE}). Check that it runs and that no firewall blocks its port."
    )


def _never_joined(me: Peer, missing: Mapping[Peer, Address]) -> ConnectError:
    return ConnectError(
        f"{_called(me)} could not connect to {_where(missing)} for {duration(timeout_seconds())}, and cannot start "
        "without the parameters there. Start servers with the workers: gossamer run --servers 1 SCRIPT; or set "
        "GOSSAMER_SERVERS=HOST:PORT to where they listen, and open the port in firewalls."
    )


def _called(me: Peer) -> str:
    """The worker in messages. In an elastic run its number has 19 digits, and its launcher shows the rank."""
    return "this worker" if is_elastic() else f"{me}"


def _where(servers: Mapping[Peer, Address]) -> str:
    return ", ".join(f"{peer} at {host}:{port}" for peer, (host, port) in sorted(servers.items()))
