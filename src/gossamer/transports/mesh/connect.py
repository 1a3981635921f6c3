"""Connection setup: a TCP connection between every two workers, authenticated at both ends.

Each rank listens, with a secret that it has given the group over the process group's channel. Rank i connects to all
lower ranks, and proves to each that it knows its secret and the run's token; the other end proves the same. Whoever
listened to that channel, and holds no token, is a stranger; strangers are disconnected. What travels afterwards is
neither authenticated nor encrypted: like torch's process groups, lock step trusts its network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack

from gossamer.errors import ConnectError, MismatchError

HELLO = struct.Struct("!II32s")  # caller, called, proof
FAILED = "failed: "  # before a rank's problem, in the text that it gives the others
SECONDS = 60.0  # for all of it
STRANGER_SECONDS = 5.0
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
    key = _key(token, secret)
    found: list[socket.socket | None] = [None] * world
    end = time.monotonic() + SECONDS

    def together(act: Callable[[], str]) -> list[str]:
        """All ranks act, and gather each other's reports; all raise where one has failed."""
        try:
            said = act()
        except OSError as problem:
            said = f"{FAILED}rank {rank} at {address} did not reach the others ({problem})"
        texts = all_gather_text(said)
        if problems := [text.removeprefix(FAILED) for text in texts if text.startswith(FAILED)]:
            raise ConnectError(problems[0])
        return texts

    with ExitStack() as ours, ExitStack() as failing:
        failing.callback(_hang_up, found)

        def listen() -> str:
            listener.append(
                ours.enter_context(socket.create_server((address, 0), family=_family(address), backlog=world))
            )
            return f"{address} {listener[0].getsockname()[1]} {secret.hex()} {_proof(key, b'token', rank, rank).hex()}"

        def call() -> str:
            for peer in range(rank):
                found[peer] = _call(doors[peer], rank, peer, end)
            return ""

        def answer() -> str:
            for _ in range(rank + 1, world):
                caller, caller_socket = _answer(listener[0], key, rank, found, end)
                found[caller] = caller_socket
            for peer in range(rank):
                _check(found[peer], doors[peer][2], rank, peer)
            return ""

        listener: list[socket.socket] = []
        heard = [text.split() for text in together(listen)]
        doors = [(host, int(number), _key(token, bytes.fromhex(theirs))) for host, number, theirs, _ in heard]
        _check_tokens(rank, [(door[2], bytes.fromhex(proof)) for door, (*_, proof) in zip(doors, heard, strict=True)])
        together(call)  # the kernel completes a connection before it is accepted
        together(answer)
        failing.pop_all()
    for each in filter(None, found):
        _settle(each)
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _hang_up(found: list[socket.socket | None]) -> None:
    for each in filter(None, found):
        each.close()


def _call(door: tuple[str, int, bytes], rank: int, peer: int, end: float) -> socket.socket:
    host, port, key = door
    connection = socket.create_connection((host, port), max(0.01, end - time.monotonic()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(HELLO.pack(rank, peer, _proof(key, b"caller", rank, peer)))
    return connection


def _answer(
    listener: socket.socket, key: bytes, rank: int, known: list[socket.socket | None], end: float
) -> tuple[int, socket.socket]:
    """The next caller that belongs to the group."""
    while True:
        listener.settimeout(max(0.01, end - time.monotonic()))
        connection, _ = listener.accept()
        try:
            connection.settimeout(STRANGER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller, called, proof = HELLO.unpack(_exactly(connection, HELLO.size))
            expected = rank < caller < len(known) and known[caller] is None and called == rank
            if expected and hmac.compare_digest(proof, _proof(key, b"caller", caller, rank)):
                connection.sendall(HELLO.pack(rank, caller, _proof(key, b"called", caller, rank)))
                return caller, connection
        except OSError:
            pass  # a stranger that said nothing, or has hung up
        connection.close()


def _check(connection: socket.socket | None, key: bytes, rank: int, peer: int) -> None:
    assert connection is not None
    answer = _exactly(connection, HELLO.size)
    if not hmac.compare_digest(answer, HELLO.pack(peer, rank, _proof(key, b"called", rank, peer))):
        raise ConnectionError(f"who listens where rank {peer} should does not know its secret")


def _key(token: bytes, secret: bytes) -> bytes:
    return hmac.digest(token, b"gossamer mesh" + secret, hashlib.sha256)


def _check_tokens(rank: int, told: list[tuple[bytes, bytes]]) -> None:
    """told: by rank, the key of its connections, and its proof that it holds the same."""
    others = [
        str(other)
        for other, (key, proof) in enumerate(told)
        if not hmac.compare_digest(proof, _proof(key, b"token", other, other))
    ]
    if others:
        raise MismatchError(
            f"rank {rank} holds another token than {', '.join(f'rank {each}' for each in others)}, so they may not "
            "belong to one run, and do not talk to each other. Give all ranks the same --token-file."
        )


def _proof(key: bytes, who: bytes, caller: int, called: int) -> bytes:
    return hmac.digest(key, who + struct.pack("!II", caller, called), hashlib.sha256)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    heard = b""
    while len(heard) < nbytes:
        if not (more := connection.recv(nbytes - len(heard))):
            raise ConnectionError("the other end hung up while it was greeted")
        heard += more
    return heard


def _settle(connection: socket.socket) -> None:
    """From now on nobody waits on it: it is asked whether there is something."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_SECONDS), ("TCP_KEEPINTVL", PROBE_SECONDS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "SO_NOSIGPIPE"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_NOSIGPIPE, 1)
