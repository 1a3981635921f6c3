"""Connection setup: a TCP connection between every two workers, authenticated at both ends.

Each rank listens, and gives the group a secret over the process group's channel. Rank i calls all lower ranks, and both
ends of each connection prove to each other that they know all secrets and the run's token (comm/handshake). Whoever
listened to that channel, and holds no token, is a stranger; strangers are disconnected. What travels afterwards is
neither authenticated nor encrypted, as in torch's process groups, unless the run encrypts: sealing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from gossamer.comm.handshake import keyed_hash
from gossamer.comm.mesh.greeter import DIAL_SECONDS, Greeter, MeshMeeting, meeting_key
from gossamer.errors import ConnectError, MismatchError

FAILED = "failed: "  # before a rank's problem, in the text that it gives the others
SECONDS = 60.0  # for each of two phases, which all ranks begin together
# Until a machine counts as gone from which nothing is in flight; elsewhere the stall watchdog asks the kernel.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 10, 5, 4

Gather = Callable[[str], list[str]]


def connect(
    rank: int, world: int, address: str, all_gather_text: Gather, token: bytes = b""
) -> list[socket.socket | None]:
    """Connections to all ranks, None to itself. all_gather_text: all ranks' texts, over another channel.

    token: the run's, where it has one. Raises MismatchError where ranks hold different ones, and ConnectError where
    some do not reach each other, on every rank and as soon as one has found it out.
    """
    secret = secrets.token_bytes(32)
    found: list[socket.socket | None] = [None] * world

    def together(act: Callable[[], str]) -> list[str]:
        """All ranks act, and gather each other's reports; all raise where one has failed."""
        try:
            said = act()
        except (OSError, ConnectError) as problem:
            said = f"{FAILED}rank {rank} at {address} did not reach the others ({problem})"
        texts = all_gather_text(said)
        if problems := [text.removeprefix(FAILED) for text in texts if text.startswith(FAILED)]:
            raise ConnectError(problems[0])
        return texts

    with ExitStack() as ours, ExitStack() as failing:
        failing.callback(_hang_up, found)

        def listen() -> str:
            listener = socket.create_server((address, 0), family=family_of(address), backlog=world)
            greeters.append(Greeter(ours.enter_context(listener)))
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
            key = meeting_key(token, b"".join(theirs for *_, theirs in listeners))
            meeting = MeshMeeting(number=0, key=key, me=rank, names=names, calls=calls, insists=False)
            for peer, connection in greeters[0].meet(meeting, SECONDS).items():
                found[peer] = connection
            return ""

        greeters: list[Greeter] = []
        heard = [text.split() for text in together(listen)]
        listeners = [(host, int(number), bytes.fromhex(theirs)) for host, number, theirs, _ in heard]
        _check_tokens(rank, token, [(bytes.fromhex(theirs), bytes.fromhex(proof)) for *_, theirs, proof in heard])
        together(call)  # the kernel completes a connection before it is accepted
        together(greet)
        failing.pop_all()
    for each in filter(None, found):
        settle(each)
    return found


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _dialed(connection: socket.socket | None) -> socket.socket:
    """A connection that is there, in place of one that is asked for."""
    assert connection is not None
    return connection


def _hang_up(found: Sequence[socket.socket | None]) -> None:
    for each in filter(None, found):
        each.close()


def _check_tokens(rank: int, token: bytes, told: Sequence[tuple[bytes, bytes]]) -> None:
    """told: by rank, its secret, and its proof that it holds the same token."""
    others = [
        str(other)
        for other, (secret, proof) in enumerate(told)
        if not hmac.compare_digest(proof, _proof(token, secret, other))
    ]
    if others:
        raise MismatchError(
            f"rank {rank} holds another token than {', '.join(f'rank {each}' for each in others)}, so they may not "
            "belong to one run, and do not talk to each other. Give all ranks the same --token-file."
        )


def _proof(token: bytes, secret: bytes, rank: int) -> bytes:
    return keyed_hash(token, b"mesh token", struct.pack("!I", rank), secret)


def shut_down(connections: Sequence[socket.socket | None]) -> None:
    """End connections that another thread waits on: it raises PeerLost. It closes them itself, since it knows them by
    numbers that other files may have once they are closed."""
    for each in filter(None, connections):
        with suppress(OSError):  # it was ended before
            each.shutdown(socket.SHUT_RDWR)


def settle(connection: socket.socket) -> None:
    """From now on nobody waits on it: it is asked whether there is something."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_SECONDS), ("TCP_KEEPINTVL", PROBE_SECONDS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "SO_NOSIGPIPE"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_NOSIGPIPE, 1)
