"""Peer endpoints: opens this process's, exchanges addresses with the other peers, and watches the servers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from gossamer.core.peer_ops import SERVER, WORKER, Await, Elapsed, Peer, PeerEvent, PeerJoined, PeerLeft, PeerScript
from gossamer.environment.run_settings import (
    LARGEST_FRAME_BYTES,
    Address,
    dedicated_servers,
    own_address,
    run_name,
    run_tls,
)
from gossamer.environment.run_token import TOKEN_BYTES, run_token
from gossamer.environment.worker_registry import publish, published
from gossamer.errors import AttachError, ConnectError, GossamerError, PeerLost
from gossamer.events import notice
from gossamer.parameter_server.server import host
from gossamer.runtime.peer_thread import PeerEndpoint, PeerThread

DEAD_AFTER_SECONDS = 5.0
LATE_SECONDS = 5.0  # a server should have been met by then
MEETING_SECONDS = 300.0  # or it never comes: where machines are slow to start, the launcher waits as long
RESTART_SECONDS = 60.0  # a launcher starts a server anew, and a large journal takes time to read
SLACK_BYTES = 2**20  # beside tensors, a frame holds names and shapes

Tell = Callable[[str], list[str]]


@dataclass
class PeerEndpoints:
    """This worker's endpoint, and that of the server in the same process, where there is one."""

    me: PeerEndpoint
    servers: int  # how many there are
    part_bytes: int  # the most that one can hold, since it is sent in one message
    own: PeerEndpoint | None  # the server's in this process
    service: PeerThread | None  # that runs it

    @property
    def beside(self) -> Peer | None:
        """The server in this process."""
        return None if self.own is None else self.own.me

    def bytes_served(self) -> int:
        """Payload bytes that the server beside this worker has sent to other workers so far."""
        if self.own is None:
            return 0
        traffic = self.own.statistics()
        return sum(each.payload_bytes_sent for peer, each in traffic.items() if peer.number != self.me.me.number)

    def drain(self) -> None:
        """Close; a server in this process goes on until all other workers have closed."""
        self.me.close()
        if self.service is not None:
            self.service.wait()

    def close(self) -> None:
        """Close at once, whoever is still there."""
        self.me.close()
        if self.own is not None:
            self.own.close()


def connect_to_servers(rank: int, world: int, servers: int | None, largest_bytes: int, tell: Tell) -> PeerEndpoints:
    """Open this worker's endpoint, and a server's where servers run in workers' processes and this is one of them.

    servers: how many; None for all there are, or one beside each worker. largest_bytes: of the tensors in one message.
    tell: all-gathers a text; not called where servers have their own processes and the launcher made a token. Raises
    ConnectError.
    """
    dedicated = dedicated_servers()
    count = min(servers or len(dedicated) or world, len(dedicated) or world)
    token = run_token() or _agreed_token(tell)
    frame_bytes = LARGEST_FRAME_BYTES if dedicated else largest_bytes + SLACK_BYTES
    open_endpoint = _opener(token, frame_bytes)
    me, own = open_endpoint(Peer(WORKER, rank)), None
    if not dedicated and rank < count:
        own = open_endpoint(Peer(SERVER, rank))
    service = None if own is None else own.start(_serve(own))
    places = dict(enumerate(dedicated[:count])) if dedicated else _told(tell, own)
    servers_at = {Peer(SERVER, number): place for number, place in places.items()}
    me.meet(servers_at)
    me.start(watch_servers(me, servers_at, RESTART_SECONDS if dedicated else 0.0))
    return PeerEndpoints(me, count, frame_bytes - SLACK_BYTES, own, service)


def connect_workers(rank: int, largest_bytes: int, tell: Tell) -> PeerEndpoint:
    """Open this worker's endpoint, which knows where all others listen; arguments as in `connect_to_servers`."""
    me = _opener(run_token() or _agreed_token(tell), largest_bytes + SLACK_BYTES)(Peer(WORKER, rank))
    publish(rank, me.address)
    me.meet({Peer(WORKER, number): place for number, place in _told(tell, me).items()})
    return me


def reconnect_worker(rank: int, world: int, largest_bytes: int) -> PeerEndpoint:
    """The same for a worker that was lost and came back alone: the launcher's store knows where the others listen, and
    they learn by `relocate` where this one does. Raises ConnectError."""
    token = run_token()
    if token is None:
        raise ConnectError(
            f"worker {rank} came back without the run's token, so nobody would talk to it. Start the run by `gossamer "
            "run`, which hands it on."
        )
    me = _opener(token, largest_bytes + SLACK_BYTES)(Peer(WORKER, rank))
    publish(rank, me.address)  # first: of two that come back at once, one finds the other
    me.meet({Peer(WORKER, number): place for number, place in published(world).items()})
    return me


def relocate(me: PeerEndpoint, peer: Peer, where: str) -> None:
    """Learn where a worker listens that came back; text that is no address changes nothing."""
    with suppress(ValueError, TypeError, ConnectError):
        host, port = json.loads(where)
        me.meet({peer: (str(host), int(port))})


class Closes(Protocol):
    def close(self) -> None:
        """Close at once, whoever is still there."""


class Watched(Protocol):
    me: Peer

    def close(self, why: GossamerError) -> None:
        """Close; callers that wait for an answer get `why`."""


def close_now(endpoints: Closes, process: int) -> None:
    """Close at once, in the process that opened them; a forked child has no part in it."""
    if os.getpid() == process:
        endpoints.close()


def _opener(token: bytes, largest_bytes: int) -> Callable[[Peer], PeerEndpoint]:
    try:  # here, since only who talks to peers needs msgspec
        from gossamer.transports.rpc.endpoint import TcpEndpoint
        from gossamer.transports.rpc.sockets import Tls
    except ModuleNotFoundError as missing:
        raise AttachError(
            f"this recipe lets peers come and go, and they cannot talk without {missing.name or 'msgspec'}, which is "
            "not installed. Run: pip install 'gossamer[wire]'"
        ) from missing

    contexts = run_tls()

    def opened(peer: Peer) -> PeerEndpoint:
        return TcpEndpoint(
            peer,
            token=token,
            run=run_name(),
            recipe="",  # workers compared theirs; a server hears of it from the first, and compares every other's
            layout="",
            address=own_address(),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            largest_frame_bytes=largest_bytes,
            tls=None if contexts is None else Tls(*contexts),
        )

    return opened


def _agreed_token(tell: Tell) -> bytes:
    """Rank 0's token, sent over the process group, which trusts its network."""
    return bytes.fromhex(tell(secrets.token_hex(TOKEN_BYTES))[0])


def _told(tell: Tell, own: PeerEndpoint | None) -> Mapping[int, Address]:
    """Where each endpoint listens, by its number; some processes have none."""
    texts = tell(json.dumps(None if own is None else own.address))
    found = [json.loads(text) for text in texts]
    return {number: (place[0], int(place[1])) for number, place in enumerate(found) if place is not None}


def _serve(endpoint: PeerEndpoint) -> PeerScript:
    """The server at `endpoint`. If it breaks, so do its connections, or all would wait for its answers for ever."""
    try:
        yield from host(endpoint.me.number)
    except PeerLost:  # the endpoint was closed
        raise
    except Exception as error:
        notice(f"{endpoint.me} cannot go on: {error!r}")
        endpoint.close()
        raise


def watch_servers(endpoint: Watched, places: Mapping[Peer, Address], patience_seconds: float) -> PeerScript:
    """Close the endpoint, with the reason, where a server never comes or is gone for good.

    places: of the servers. Those that were not met within LATE_SECONDS are named in a notice; after MEETING_SECONDS
    the endpoint is closed. patience_seconds: for one that was here.
    """
    missed, gone = dict(places), dict[Peer, float]()
    heard: PeerEvent = yield Await(until=-inf)
    late, refused = heard.moment + LATE_SECONDS, heard.moment + MEETING_SECONDS
    while True:
        match heard:
            case PeerLeft(peer=peer, moment=moment) if peer.kind == SERVER:
                gone[peer] = moment + patience_seconds
            case PeerJoined(peer=peer):
                gone.pop(peer, None)
                missed.pop(peer, None)
            case Elapsed(moment=moment):
                lost = [str(peer) for peer, until in gone.items() if until <= moment]
                if lost:
                    notice(f"{', '.join(lost)} did not come back, and what it held is out of reach")
                    endpoint.close(PeerLost(f"{', '.join(lost)} did not come back, and what it held is out of reach."))
                    return
                if missed and moment >= refused:
                    endpoint.close(_never_met(endpoint.me, missed))
                    return
                if missed and moment >= late:
                    notice(_not_met_yet(endpoint.me, missed))
                    late = inf
        heard = yield Await(until=min([*gone.values(), *((late, refused) if missed else ())], default=None))


def _not_met_yet(me: Peer, missed: Mapping[Peer, Address]) -> str:
    return (
        f"{me} waits for {_where(missed)}, not heard for {LATE_SECONDS:.0f} s, and goes on waiting. Does it run, and "
        "does no firewall stand between?"
    )


def _never_met(me: Peer, missed: Mapping[Peer, Address]) -> ConnectError:
    return ConnectError(
        f"for {MEETING_SECONDS:.0f} s nothing was heard of {_where(missed)}, so {me} cannot begin: parameters are held "
        "there. Start servers with the workers: gossamer run --servers 1 SCRIPT; or let GOSSAMER_SERVERS=HOST:PORT "
        "name where they listen, with no firewall between."
    )


def _where(servers: Mapping[Peer, Address]) -> str:
    return ", ".join(f"{peer} at {host}:{port}" for peer, (host, port) in sorted(servers.items()))
