"""Connection setup: an authenticated TCP connection between every two workers.

Each rank listens, and sends the group a secret over the process group's channel. Rank i dials all lower ranks, and both
ends of each connection prove to each other that they know all secrets and the run's token (comm/handshake). Without the
token, an eavesdropper of that channel cannot authenticate; strangers are disconnected. As in torch's process groups,
later traffic is neither authenticated nor encrypted, unless the run uses encryption (sealing).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from gossamer.base.host_port import family_of
from gossamer.comm.handshake import keyed_hash
from gossamer.comm.mesh.greeter import DIAL_SECONDS, NO_EXCHANGE, Greeter, KeyExchange, MeshMeeting, meeting_key
from gossamer.comm.mesh.long_links import requested_congestion, use_congestion
from gossamer.errors import ConnectError, MismatchError

FAILED = "failed: "  # prefix of a rank's error in the text that it sends to the other ranks
SECONDS = 60.0  # time limit of each of two phases, which all ranks begin together
# Time until a machine without data in flight counts as down; otherwise the stall watchdog queries the kernel.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 5, 4

Gather = Callable[[str], list[str]]


def connect(
    rank: int,
    world: int,
    address: str,
    all_gather_text: Gather,
    token: bytes = b"",
    exchange: KeyExchange = NO_EXCHANGE,
) -> list[socket.socket | None]:
    """Connect this rank to all others.

    Args:
        rank: This rank.
        world: Number of ranks.
        address: Local address to listen on.
        all_gather_text: All-gathers a text of each rank over another channel.
        token: The run's token, if it has one.
        exchange: Exchanges keys during the handshakes.

    Returns:
        Sockets by rank; None at `rank`.

    Raises:
        MismatchError: Ranks have different tokens.
        ConnectError: Two ranks cannot reach each other. On every rank, as soon as one rank detects it.
        ValueError: The requested congestion control is not available.
    """
    secret = secrets.token_bytes(32)
    found: list[socket.socket | None] = [None] * world

    def together(act: Callable[[], str]) -> list[str]:
        """Run `act` on all ranks, and gather the results. All ranks raise if one has failed."""
        try:
            answer = act()
        except (OSError, ConnectError) as problem:
            answer = f"{FAILED}rank {rank} at {address} could not reach the other ranks ({problem})"
        texts = all_gather_text(answer)
        if problems := [text.removeprefix(FAILED) for text in texts if text.startswith(FAILED)]:
            raise ConnectError(problems[0])
        return texts

    with ExitStack() as sockets, ExitStack() as failing:
        failing.callback(hang_up, found)

        def listen() -> str:
            listener = socket.create_server((address, 0), family=family_of(address), backlog=world)
            greeters.append(Greeter(sockets.enter_context(listener)))
            return f"{address} {listener.getsockname()[1]} {secret.hex()} {_proof(token, secret, rank).hex()}"

        def call() -> str:
            end = time.monotonic() + SECONDS
            for peer, (host, port, _) in enumerate(listeners[:rank]):
                left = max(0.01, end - time.monotonic())
                found[peer] = socket.create_connection((host, port), min(DIAL_SECONDS, left))
            return ""

        def greet() -> str:
            calls = {peer: partial(_dialed, each) for peer, each in enumerate(found[:rank])}
            names = {peer: f"rank {peer}" for peer in range(world) if peer != rank}
            key = meeting_key(token, b"".join(remote for *_, remote in listeners))
            meeting = MeshMeeting(
                number=0, key=key, me=rank, names=names, calls=calls, insists=False, exchange=exchange
            )
            for peer, connection in greeters[0].meet(meeting, SECONDS).items():
                found[peer] = connection
            return ""

        greeters: list[Greeter] = []
        incoming = [text.split() for text in together(listen)]
        listeners = [(host, int(number), bytes.fromhex(remote)) for host, number, remote, _ in incoming]
        _check_tokens(rank, token, [(bytes.fromhex(remote), bytes.fromhex(proof)) for *_, remote, proof in incoming])
        together(call)  # the kernel completes a connection before accept()
        together(greet)
        for each in filter(None, found):
            settle(each)
        failing.pop_all()
    return found


def _dialed(connection: socket.socket | None) -> socket.socket:
    """Return an existing connection in the form of a Dial."""
    assert connection is not None
    return connection


def hang_up(sockets: Iterable[socket.socket | None]) -> None:
    """Close all sockets."""
    for each in filter(None, sockets):
        each.close()


def _check_tokens(rank: int, token: bytes, received: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise MismatchError for another token. received: by rank, its secret and the proof that it has the same token."""
    others = [
        str(other)
        for other, (secret, proof) in enumerate(received)
        if not hmac.compare_digest(proof, _proof(token, secret, other))
    ]
    if others:
        raise MismatchError(
            f"rank {rank} has a different token than {', '.join(f'rank {each}' for each in others)}, so they may "
            "belong to different runs and refuse to connect. Pass the same --token-file to all ranks."
        )


def _proof(token: bytes, secret: bytes, rank: int) -> bytes:
    return keyed_hash(token, b"mesh token", struct.pack("!I", rank), secret)


def shut_down(connections: Sequence[socket.socket | None]) -> None:
    """Shut down connections on which another thread waits, so that it raises PeerLost. That thread must close them: it
    uses descriptors, which other files could reuse after a close here."""
    for each in filter(None, connections):
        with suppress(OSError):  # already shut down
            each.shutdown(socket.SHUT_RDWR)


def settle(connection: socket.socket) -> None:
    """Make a connection non-blocking, with keep-alive probes and the requested congestion control."""
    connection.setblocking(False)
    if (congestion := requested_congestion()) is not None:
        use_congestion(connection, congestion)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_SECONDS), ("TCP_KEEPINTVL", PROBE_SECONDS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "SO_NOSIGPIPE"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_NOSIGPIPE, 1)
