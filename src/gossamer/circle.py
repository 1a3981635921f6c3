"""Peers find each other: where the workers are, or who serves where and whether all of them are still there."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gossamer.environment.servers import (
    LARGEST_FRAME_BYTES,
    TOKEN_BYTES,
    Address,
    dedicated_servers,
    own_address,
    run_name,
    run_token,
)
from gossamer.errors import AttachError, PeerLost
from gossamer.events import notice
from gossamer.peers import SERVER, WORKER, Await, Elapsed, Joined, Left, Peer, PeerScript
from gossamer.serving.host import host

if TYPE_CHECKING:
    from gossamer.transports.tcp import Handle, TcpEndpoint

DEAD_AFTER_SECONDS = 5.0
RESTART_SECONDS = 60.0  # a launcher starts a server anew, and a large journal takes time to read
SLACK_BYTES = 2**20  # beside tensors, a frame holds names and shapes

Tell = Callable[[str], list[str]]


@dataclass
class Circle:
    """This worker's endpoint, and that of the server which lives beside it, where one does.

    servers: how many there are; beside: this process's own.
    """

    me: TcpEndpoint
    servers: int
    own: TcpEndpoint | None
    service: Handle | None

    @property
    def beside(self) -> Peer | None:
        return None if self.own is None else self.own.me

    def bytes_served(self) -> int:
        """Payload bytes that the server beside this worker has sent to other workers so far."""
        if self.own is None:
            return 0
        traffic = self.own.statistics()
        return sum(each.payload_bytes_sent for peer, each in traffic.items() if peer.number != self.me.me.number)

    def linger(self) -> None:
        """Say goodbye; a server beside this worker stays until all other workers did."""
        self.me.close()
        if self.service is not None:
            self.service.wait()

    def close(self) -> None:
        """Go, whoever is still there."""
        self.me.close()
        if self.own is not None:
            self.own.close()


def assemble(rank: int, world: int, servers: int | None, largest_bytes: int, tell: Tell) -> Circle:
    """Open this worker's endpoint, and a server's where servers live beside workers and it is this one's turn.

    servers: how many; None for all there are, or one beside each worker. largest_bytes: of the tensors in one message.
    tell: says a text to all workers and returns everyone's, by rank; not called where servers live apart and the
    launcher made a token. Raises ConnectError.
    """
    dedicated = dedicated_servers()
    count = min(servers or len(dedicated) or world, len(dedicated) or world)
    token = run_token() or _agreed_token(tell)
    open_endpoint = _opener(token, LARGEST_FRAME_BYTES if dedicated else largest_bytes + SLACK_BYTES)
    me, own = open_endpoint(Peer(WORKER, rank)), None
    if not dedicated and rank < count:
        own = open_endpoint(Peer(SERVER, rank))
    service = None if own is None else own.start(_serve(own))
    places = dict(enumerate(dedicated[:count])) if dedicated else _told(tell, own)
    me.meet({Peer(SERVER, number): place for number, place in places.items()})
    me.start(_watch(me, RESTART_SECONDS if dedicated else 0.0))
    return Circle(me, count, own, service)


def assemble_workers(rank: int, largest_bytes: int, tell: Tell) -> TcpEndpoint:
    """Open this worker's endpoint, which knows where all others listen; largest_bytes, tell: as in `assemble`."""
    me = _opener(run_token() or _agreed_token(tell), largest_bytes + SLACK_BYTES)(Peer(WORKER, rank))
    me.meet({Peer(WORKER, number): place for number, place in _told(tell, me).items()})
    return me


class Closes(Protocol):
    def close(self) -> None:
        """Go, whoever is still there."""


def leave(endpoints: Closes, process: int) -> None:
    """Go at once, in the process that opened them; a forked child has no part in it."""
    if os.getpid() == process:
        endpoints.close()


def _opener(token: bytes, largest_bytes: int) -> Callable[[Peer], TcpEndpoint]:
    try:  # here, since only who talks to peers needs msgspec
        from gossamer.transports.tcp import TcpEndpoint
    except ModuleNotFoundError as missing:
        raise AttachError(
            f"this recipe lets peers come and go, and they cannot talk without {missing.name or 'msgspec'}, which is "
            "not installed. Run: pip install 'gossamer[wire]'"
        ) from missing

    def opened(peer: Peer) -> TcpEndpoint:
        return TcpEndpoint(
            peer,
            token=token,
            run=run_name(),
            recipe="",  # workers compared theirs; a server hears of it from the first, and compares every other's
            layout="",
            address=own_address(),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            largest_frame_bytes=largest_bytes,
        )

    return opened


def _agreed_token(tell: Tell) -> bytes:
    """Rank 0's, by the process group, which trusts its network."""
    return bytes.fromhex(tell(secrets.token_hex(TOKEN_BYTES))[0])


def _told(tell: Tell, own: TcpEndpoint | None) -> Mapping[int, Address]:
    """Where each endpoint listens, by its number; some have none."""
    texts = tell(json.dumps(None if own is None else own.address))
    found = [json.loads(text) for text in texts]
    return {number: (place[0], int(place[1])) for number, place in enumerate(found) if place is not None}


def _serve(endpoint: TcpEndpoint) -> PeerScript:
    """The server at `endpoint`. If it breaks, so do its connections, or all would wait for its answers for ever."""
    try:
        yield from host(endpoint.me.number)
    except PeerLost:  # the endpoint was closed
        raise
    except Exception as error:
        notice(f"{endpoint.me} cannot go on: {error!r}")
        endpoint.close()
        raise


def _watch(endpoint: TcpEndpoint, patience_seconds: float) -> PeerScript:
    """Whoever waits for a server that is gone for good shall not wait for ever: then the endpoint is closed."""
    gone: dict[Peer, float] = {}
    while True:
        event = yield Await(until=min(gone.values(), default=None))
        match event:
            case Left(peer=peer, moment=moment) if peer.kind == SERVER:
                gone[peer] = moment + patience_seconds
            case Joined(peer=peer):
                gone.pop(peer, None)
            case Elapsed(moment=moment):
                lost = [str(peer) for peer, until in gone.items() if until <= moment]
                if lost:
                    notice(f"{', '.join(lost)} did not come back, and what it held is out of reach")
                    endpoint.close()
                    return
