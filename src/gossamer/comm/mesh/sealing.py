"""Sealing: keys of a mesh's connections, agreed inside TLS 1.3, and the libcrypto by which the compiled loops encrypt.

With `gossamer run --tls FOLDER` every two workers shake hands over the connection that they have, each with a
certificate of the run's authority. Inside TLS each tells the other 32 random bytes; then TLS ends, and the loops go on
over the bare connection with a key for each way, made of both and of the run's token: TLS brings forward secrecy and
knows strangers, and who has a certificate, and not the token, comes to other keys. What is sealed, and how:
kernels-src/mesh_sealing.hpp.

sources: TLS 1.3 (Rescorla 2018, RFC 8446); HKDF (Krawczyk 2010, CRYPTO); AES-GCM (Dworkin 2007, NIST SP 800-38D);
ChaCha20-Poly1305 (Nir & Langley 2018, RFC 8439)
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import importlib
import secrets
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from gossamer.comm.environment.run_settings import run_tls
from gossamer.comm.mesh.connect import Gather
from gossamer.comm.mesh.greeter import TURN_SECONDS, MembersUnreached
from gossamer.errors import ConnectError

AES, CHACHA = "AES-256-GCM", "ChaCha20-Poly1305"
CIPHERS = {AES: "EVP_aes_256_gcm", CHACHA: "EVP_chacha20_poly1305"}
KEY_BYTES, NONCE_BYTES = 32, 32
TOLD = struct.Struct("!?32s")  # whether this processor has AES, and a nonce
SECONDS = 30.0  # for one handshake's longest silence

# CipherFunctions in kernels-src/mesh_sealing.hpp, but for the cipher, which comes last
FUNCTIONS = (
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_EncryptInit_ex",
    "EVP_EncryptUpdate",
    "EVP_EncryptFinal_ex",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_DecryptFinal_ex",
    "EVP_CIPHER_CTX_ctrl",
)

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]  # for dialing and for accepting


@dataclass(frozen=True)
class LinkKeys:
    """What seals one connection at one of its ends: the other end's two keys are the same ones, exchanged."""

    cipher: str  # of CIPHERS
    sends: bytes = field(repr=False)
    hears: bytes = field(repr=False)


LinksKeys = Mapping[int, LinkKeys]  # by rank


# -- libcrypto ----------------------------------------------------------------------------------------


@cache
def libcrypto() -> ctypes.CDLL:
    """The libcrypto that this Python's own ssl calls. Raises ConnectError where there is none to call.

    Looked for, in this order: what `_ssl` and `_hashlib` were linked with; the program itself, where Python was linked
    with OpenSSL as a whole; and the system's library of that name, where Python hides its own.
    """
    for name in _candidates():
        try:
            found = ctypes.CDLL(name)
            if all(hasattr(found, each) for each in (*FUNCTIONS, *CIPHERS.values())):
                return found
        except OSError:
            continue
    raise ConnectError(
        "This run was told to encrypt (--tls), and this Python hides the OpenSSL that it was made with, so the "
        "compiled loops cannot call it and what moves in lock step would travel for all to read. Use a Python with "
        "OpenSSL as a shared library (the system's, conda's, pyenv's), or install libcrypto.so.3, or leave out --tls "
        "on a network that you trust."
    )


def _candidates() -> Iterator[str | None]:
    for name in ("_ssl", "_hashlib"):
        if file := getattr(importlib.import_module(name), "__file__", None):
            yield file  # a name is looked up in what a library was linked with, too
    yield None
    yield "libcrypto.3.dylib" if sys.platform == "darwin" else "libcrypto.so.3"


@cache
def cipher_functions(cipher: str) -> ctypes.Array[ctypes.c_void_p]:
    """What kernels-src/mesh_sealing.hpp calls. Raises ConnectError where there is no libcrypto."""
    library = libcrypto()
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in (*FUNCTIONS, CIPHERS[cipher])]
    return (ctypes.c_void_p * len(found))(*[each.value for each in found])


@cache
def has_aes() -> bool:
    """Whether this processor has instructions for AES, as far as that is known: without them ChaCha20 is faster."""
    if sys.platform == "darwin":
        return True
    try:
        return "aes" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


# -- keys ---------------------------------------------------------------------------------------------


def mesh_tls() -> Contexts | None:
    """The run's TLS contexts, for TLS 1.3 alone; None where it was not told to encrypt.

    Raises ConnectError for certificates that cannot be read, and where the loops could not encrypt.
    """
    if (tls := run_tls()) is None:
        return None
    libcrypto()
    for context in tls:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return tls


def agree_group(
    rank: int, sockets: list[socket.socket | None], tls: Contexts, token: bytes, all_gather_text: Gather
) -> LinksKeys:
    """Keys of all connections of a group; `sockets`, by rank, are replaced in place. All ranks call it.

    all_gather_text: all ranks' texts, over the channel of the greeting. Raises ConnectError on every rank where any two
    do not come to keys; all sockets are closed then.
    """
    context = "\n".join(all_gather_text(secrets.token_hex(NONCE_BYTES))).encode()
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
    tls: Contexts,
    token: bytes,
    context: bytes,
    seconds: float = SECONDS,
    over: Callable[[], bool] = lambda: False,
) -> dict[int, LinkKeys]:
    """Keys of connections to other ranks, each agreed inside TLS; `sockets` are replaced in place. Lower ranks accept.

    token: the run's; context: what is the same at all ends and new for every group, such as its secret. over: asked now
    and then, and once it is true nobody waits any longer. The other ends call it, too. Raises MembersUnreached, a
    ConnectError, where one of them shows no certificate, or says nothing for so many seconds: `unreached` are their
    ranks, and nobody's where it was over before. All sockets are closed then.
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
    ):  # in turns, far workers would wait for long
        handles = [open_handles.enter_context(each.dup()) for each in peers.values()]  # TLS takes the sockets over
        tickets = {peer: pool.submit(one, peer, each) for peer, each in peers.items()}
        ended = _wait(list(tickets.values()), handles, over)
    problems = {peer: problem for peer, ticket in tickets.items() if (problem := ticket.exception())}
    if not problems and not ended:
        return {peer: ticket.result() for peer, ticket in tickets.items()}
    hang_up(sockets)
    if ended:
        raise MembersUnreached(f"rank {rank} was told that the group is over before all had agreed on keys", ())
    for problem in problems.values():
        if not isinstance(problem, OSError | ValueError):
            raise problem
    peer, problem = next(iter(problems.items()))
    raise MembersUnreached(
        f"rank {rank} and rank {peer} came to no keys ({problem}), so nothing may travel between them in a run with "
        "--tls. Each needs a certificate of the same authority: put cert.pem, key.pem and ca.pem into its folder.",
        tuple(problems),
    )


def _wait(tickets: Sequence[Future[LinkKeys]], handles: Sequence[socket.socket], over: Callable[[], bool]) -> bool:
    """Until all have ended. Whether they were cut off, since it was over."""
    left: Iterable[Future[LinkKeys]] = tickets
    while True:
        left = wait(left, TURN_SECONDS).not_done
        if not left:
            return False
        if over():
            for each in handles:
                with suppress(OSError):  # the peer has hung up before
                    each.shutdown(socket.SHUT_RDWR)
            return True


def shake_hands(
    connection: socket.socket,
    tls: Contexts,
    token: bytes,
    context: bytes,
    ends: tuple[int, int],
    *,
    calls: bool,
    seconds: float = SECONDS,
) -> tuple[socket.socket, LinkKeys]:
    """One connection's keys, and a socket in its place, which does not block. `connection` may not be used any more.

    ends: the caller's number and the other one's; calls: whether this is the caller. seconds: of silence, at most.
    Raises OSError, which ssl.SSLError is, too.
    """
    dialing, accepting = tls
    connection.settimeout(seconds)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the farewell waits for acknowledgments
    with (dialing if calls else accepting).wrap_socket(connection, server_side=not calls) as inside:
        if inside.version() != "TLSv1.3":
            raise ConnectionError(f"{inside.version()} is too old")
        mine = TOLD.pack(has_aes(), secrets.token_bytes(NONCE_BYTES))
        inside.sendall(mine)
        theirs = _exactly(inside, TOLD.size)
        bare = socket.socket(fileno=inside.unwrap().detach())
    bare.setblocking(False)
    cipher = AES if TOLD.unpack(mine)[0] and TOLD.unpack(theirs)[0] else CHACHA
    nonces = mine + theirs if calls else theirs + mine
    ways = [derive_key(token, nonces, context, ends, cipher, way) for way in (b"caller", b"called")]
    return bare, LinkKeys(cipher, *(ways if calls else reversed(ways)))


def derive_key(token: bytes, nonces: bytes, context: bytes, ends: tuple[int, int], cipher: str, sender: bytes) -> bytes:
    """The key of what one end of a connection sends: HKDF-SHA256 of what both told each other inside TLS.

    salt: the run's token; info: everything else by which two keys may differ, of fixed lengths but for the last.
    """
    extracted = hmac.digest(token, nonces, hashlib.sha256)
    info = hashlib.sha256(context).digest() + struct.pack("!II", *ends) + sender + b" " + cipher.encode()
    return hmac.digest(extracted, b"gossamer mesh " + info + b"\x01", hashlib.sha256)


def _exactly(connection: ssl.SSLSocket, nbytes: int) -> bytes:
    heard = b""
    while len(heard) < nbytes:
        if not (more := connection.recv(nbytes - len(heard))):
            raise ConnectionError("the other end hung up during the handshake")
        heard += more
    return heard


def hang_up(sockets: Iterable[socket.socket | None]) -> None:
    """Close all that are there."""
    for each in filter(None, sockets):
        each.close()
