"""Sealing: keys of encrypted connections, agreed inside TLS 1.3.

With `gossamer run --tls FOLDER`, every two workers perform a TLS handshake over their existing connection, each with a
certificate of the run's authority. Inside TLS each sends 32 random bytes. TLS is then shut down, and the loops use the
bare connection with one key per direction, derived from both nonces and the run's token. TLS provides forward secrecy
and rejects strangers; a worker with a certificate but without the token derives other keys. The encryption itself is
described in kernels-src/mesh_sealing.hpp.

sources: TLS 1.3 (Rescorla 2018, RFC 8446); HKDF (Krawczyk 2010, CRYPTO)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from gossamer.base import system
from gossamer.comm.libcrypto import AES, CHACHA, libcrypto
from gossamer.comm.mesh.connect import Gather, hang_up
from gossamer.comm.mesh.greeter import TURN_SECONDS, MembersUnreached
from gossamer.comm.tls_contexts import Tls, run_tls
from gossamer.errors import ConnectError

NONCE_BYTES = 32
OFFER = struct.Struct("!?32s")  # whether this processor has AES instructions, and a nonce
SECONDS = 30.0  # longest silence during a handshake


@dataclass(frozen=True)
class LinkKeys:
    """Keys of one connection at one of its ends. The other end has the same two keys in exchanged roles."""

    cipher: str  # of CIPHERS
    sends: bytes = field(repr=False)
    receives: bytes = field(repr=False)


LinksKeys = Mapping[int, LinkKeys]  # by rank


# -- keys --------------------------------------------------------------------------------------------------------------


def mesh_tls() -> Tls | None:
    """Return the run's TLS contexts, restricted to TLS 1.3; None if encryption was not requested.

    Raises ConnectError if certificates cannot be read, or the loops cannot encrypt.
    """
    if (tls := run_tls()) is None:
        return None
    libcrypto()
    for context in tls:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return tls


def group_context(all_gather_text: Gather) -> bytes:
    """Draw the context of a group's keys: equal on all ranks and different for each group. Collective call."""
    return "\n".join(all_gather_text(secrets.token_hex(NONCE_BYTES))).encode()


def agree_group(
    rank: int, sockets: list[socket.socket | None], tls: Tls, token: bytes, all_gather_text: Gather
) -> LinksKeys:
    """Agree on keys for all connections of a group. Collective call.

    Args:
        rank: This rank.
        sockets: By rank; replaced in place.
        tls: Contexts for dialing and accepting.
        token: The run's token.
        all_gather_text: All-gathers texts over the channel of the rendezvous.

    Raises:
        ConnectError: Two ranks failed to agree on keys. On every rank; all sockets are closed.
    """
    context = group_context(all_gather_text)
    problem, keys = "", dict[int, LinkKeys]()
    try:
        keys = agree(rank, sockets, tls, token, context)
    except ConnectError as error:
        problem = str(error)
    if problems := list(filter(None, all_gather_text(problem))):
        hang_up(sockets)
        raise ConnectError(problems[0])
    return keys


def agree(
    rank: int,
    sockets: list[socket.socket | None],
    tls: Tls,
    token: bytes,
    context: bytes,
    seconds: float = SECONDS,
    over: Callable[[], bool] = lambda: False,
) -> dict[int, LinkKeys]:
    """Agree on keys with all connected ranks, each inside TLS. Lower ranks accept. The other ends call it, too.

    Args:
        rank: This rank.
        sockets: By rank; replaced in place.
        tls: Contexts for dialing and accepting.
        token: The run's token.
        context: Equal at all ends and different for each group, such as the group's secret.
        seconds: Longest silence of a peer.
        over: Called repeatedly; the wait ends when it returns True.

    Raises:
        MembersUnreached: A peer presented no valid certificate, or was silent for `seconds`; `unreached` lists such
            ranks, or none if `over` returned True. All sockets are closed.
    """
    peers = {peer: each for peer, each in enumerate(sockets) if each is not None}
    if not peers:
        return {}

    def one(peer: int, connection: socket.socket) -> LinkKeys:
        ends = max(rank, peer), min(rank, peer)
        calls = peer < rank
        sockets[peer], keys = shake_hands(connection, tls, token, context, ends, calls=calls, seconds=seconds)
        return keys

    with (
        ExitStack() as open_handles,
        ThreadPoolExecutor(len(peers)) as pool,
    ):  # concurrently, because round trips to distant workers would add up
        handles = [open_handles.enter_context(each.dup()) for each in peers.values()]  # TLS takes over the sockets
        tickets = {peer: pool.submit(one, peer, each) for peer, each in peers.items()}
        ended = _wait(list(tickets.values()), handles, over)
    problems = {peer: problem for peer, ticket in tickets.items() if (problem := ticket.exception())}
    if not problems and not ended:
        return {peer: ticket.result() for peer, ticket in tickets.items()}
    hang_up(sockets)
    if ended:
        raise MembersUnreached(f"rank {rank} was notified that the group is over before all ranks agreed on keys", ())
    for problem in problems.values():
        if not isinstance(problem, OSError | ValueError):
            raise problem
    peer, problem = next(iter(problems.items()))
    raise MembersUnreached(
        f"rank {rank} and rank {peer} could not agree on keys ({problem}), which a run with --tls requires. "
        "Each needs a certificate of the same authority: put cert.pem, key.pem and ca.pem into its folder.",
        tuple(problems),
    )


def _wait(tickets: Sequence[Future[LinkKeys]], handles: Sequence[socket.socket], over: Callable[[], bool]) -> bool:
    """Wait for all handshakes. Returns True if `over` interrupted them."""
    left: Iterable[Future[LinkKeys]] = tickets
    while True:
        left = wait(left, TURN_SECONDS).not_done
        if not left:
            return False
        if over():
            for each in handles:
                with suppress(OSError):  # the peer has disconnected before
                    each.shutdown(socket.SHUT_RDWR)
            return True


def shake_hands(
    connection: socket.socket,
    tls: Tls,
    token: bytes,
    context: bytes,
    ends: tuple[int, int],
    *,
    calls: bool,
    seconds: float = SECONDS,
) -> tuple[socket.socket, LinkKeys]:
    """Agree on keys for one connection.

    Args:
        connection: The connected socket; unusable afterwards.
        tls: Contexts for dialing and accepting.
        token: The run's token.
        context: Equal at both ends and different for each group.
        ends: Numbers of the caller and of the called rank.
        calls: Whether this end is the caller.
        seconds: Longest silence of the peer.

    Returns:
        A non-blocking socket in place of `connection`, and its keys.

    Raises:
        OSError: The handshake failed (ssl.SSLError is a subclass).
    """
    dialing, accepting = tls
    connection.settimeout(seconds)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or close_notify waits for acknowledgments
    with (dialing if calls else accepting).wrap_socket(connection, server_side=not calls) as inside:
        if inside.version() != "TLSv1.3":
            raise ConnectionError(f"{inside.version()} is too old")
        local = OFFER.pack(system.has_aes(), secrets.token_bytes(NONCE_BYTES))
        inside.sendall(local)
        remote = _exactly(inside, OFFER.size)
        bare = socket.socket(fileno=inside.unwrap().detach())
    bare.setblocking(False)
    cipher = AES if OFFER.unpack(local)[0] and OFFER.unpack(remote)[0] else CHACHA
    nonces = local + remote if calls else remote + local
    ways = [derive_key(token, nonces, context, ends, cipher, way) for way in (b"caller", b"called")]
    return bare, LinkKeys(cipher, *(ways if calls else reversed(ways)))


def derive_key(token: bytes, nonces: bytes, context: bytes, ends: tuple[int, int], cipher: str, sender: bytes) -> bytes:
    """Derive the key for one direction: HKDF-SHA256 of the nonces that both ends exchanged inside TLS.

    salt: the run's token; info: all other values by which two keys may differ, of fixed lengths except for the last.
    """
    extracted = hmac.digest(token, nonces, hashlib.sha256)
    info = hashlib.sha256(context).digest() + struct.pack("!II", *ends) + sender + b" " + cipher.encode()
    return hmac.digest(extracted, b"gossamer mesh " + info + b"\x01", hashlib.sha256)


def _exactly(connection: ssl.SSLSocket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        if not (more := connection.recv(nbytes - len(received))):
            raise ConnectionError("the peer disconnected during the handshake")
        received += more
    return received
