"""Key exchange: keys of sealed connections without certificates, for runs on several machines.

Each member draws an X25519 key pair per meeting and sends the public half as a claim of the mesh handshake, which
authenticates it by the secrets of the meeting. The keys of a connection are derived from the Diffie-Hellman secret and
from the handshake. So a relay that forwards all bytes cannot read them, even if it learns the run's token later; and
without the token it cannot take the place of a member.

sources: X25519 (Langley, Hamburg & Turner 2016, RFC 7748); HKDF (Krawczyk 2010, CRYPTO)
"""

from __future__ import annotations

import ctypes
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache

from gossamer.base import system
from gossamer.comm.handshake import DIALER, Handshake
from gossamer.comm.libcrypto import AES, CHACHA, libcrypto
from gossamer.comm.mesh.greeter import KeyExchange
from gossamer.comm.mesh.sealing import LinkKeys, derive_key
from gossamer.errors import ConnectError

X25519 = 1034  # NID_X25519 of OpenSSL
POINT_BYTES = 32
OFFER = struct.Struct(f"!?{POINT_BYTES}s")  # whether this processor has AES instructions, and a public key


class KeyShare:
    """One member's key pair for one meeting. offer: the bytes to send to the other members.

    Raises ConnectError if libcrypto is missing.
    """

    def __init__(self) -> None:
        self._private = secrets.token_bytes(POINT_BYTES)
        self.offer = OFFER.pack(system.has_aes(), public_key(self._private))

    def keys(
        self, offer: bytes, handshake: Handshake, context: bytes, ends: tuple[int, int], *, calls: bool
    ) -> LinkKeys:
        """Derive the keys of one connection.

        Args:
            offer: of the other end.
            handshake: of this connection, complete.
            context: equal at both ends and different for each meeting.
            ends: ranks of the caller and of the called member.
            calls: whether this end is the caller.

        Raises:
            ConnectError: the offer is not a public key.
        """
        if len(offer) != OFFER.size:
            raise ConnectError(f"the other worker sent {len(offer)} bytes as a public key, expected {OFFER.size}")
        remote_aes, remote_public = OFFER.unpack(offer)
        cipher = AES if remote_aes and OFFER.unpack(self.offer)[0] else CHACHA
        shared = agreed_secret(self._private, remote_public)
        proven = handshake.derive_key(b"seal", DIALER)
        ways = [derive_key(proven, shared, context, ends, cipher, way) for way in (b"caller", b"called")]
        return LinkKeys(cipher, *(ways if calls else reversed(ways)))


class LinkKeyExchange(KeyExchange):
    """Keys of one member's connections in one meeting.

    Args:
        rank: this member's rank.
        context: equal at all members and different for each meeting.
        keys: receives the keys of each connection, by rank.
        rank_of: the rank of a member's number.

    Attributes:
        offer: whether this processor has AES instructions, and a public key.

    Raises:
        ConnectError: libcrypto is missing.
    """

    def __init__(
        self, rank: int, context: bytes, keys: dict[int, LinkKeys], rank_of: Callable[[int], int] = int
    ) -> None:
        self._rank, self._context, self._keys, self._rank_of = rank, context, keys, rank_of
        self._share = KeyShare()
        self.offer = self._share.offer

    def agreed(self, number: int, offer: bytes, handshake: Handshake) -> None:
        """Derive the keys of the connection to member `number`, which sent `offer`. Raises ConnectError."""
        peer = self._rank_of(number)
        ends = max(self._rank, peer), min(self._rank, peer)
        self._keys[peer] = self._share.keys(offer, handshake, self._context, ends, calls=peer < self._rank)


def public_key(private: bytes) -> bytes:
    """The X25519 public key of 32 secret bytes. Raises ConnectError without a libcrypto."""
    library, out, size = _library(), ctypes.create_string_buffer(POINT_BYTES), ctypes.c_size_t(POINT_BYTES)
    with ExitStack() as held:
        key = _held(held, "EVP_PKEY_free", library.EVP_PKEY_new_raw_private_key(X25519, None, private, POINT_BYTES))
        _check(library.EVP_PKEY_get_raw_public_key(key, out, ctypes.byref(size)))
    return out.raw


def agreed_secret(private: bytes, public: bytes) -> bytes:
    """The Diffie-Hellman secret of one end's private key and the other's public key. Raises ConnectError."""
    library, out, size = _library(), ctypes.create_string_buffer(POINT_BYTES), ctypes.c_size_t(POINT_BYTES)
    with ExitStack() as held:
        own = _held(held, "EVP_PKEY_free", library.EVP_PKEY_new_raw_private_key(X25519, None, private, POINT_BYTES))
        remote = _held(held, "EVP_PKEY_free", library.EVP_PKEY_new_raw_public_key(X25519, None, public, POINT_BYTES))
        context = _held(held, "EVP_PKEY_CTX_free", library.EVP_PKEY_CTX_new(own, None))
        _check(library.EVP_PKEY_derive_init(context))
        _check(library.EVP_PKEY_derive_set_peer(context, remote))
        _check(library.EVP_PKEY_derive(context, out, ctypes.byref(size)))  # fails for points of small order
    return out.raw


def _held(held: ExitStack, free: str, pointer: int | None) -> ctypes.c_void_p:
    if not pointer:
        raise ConnectError("OpenSSL rejected a key of X25519, so no keys can be agreed with this worker")
    found = ctypes.c_void_p(pointer)
    held.callback(getattr(_library(), free), found)
    return found


def _check(result: int) -> None:
    if result != 1:
        raise ConnectError("OpenSSL could not agree on a key with X25519: the other worker sent an invalid public key")


@cache
def _library() -> ctypes.CDLL:
    """libcrypto with the types of its functions."""
    library = libcrypto()
    pointer, size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
    raw: Sequence[object] = (ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_size_t)
    for name, returned, given in (
        ("EVP_PKEY_new_raw_private_key", pointer, raw),
        ("EVP_PKEY_new_raw_public_key", pointer, raw),
        ("EVP_PKEY_get_raw_public_key", ctypes.c_int, (pointer, ctypes.c_char_p, size)),
        ("EVP_PKEY_CTX_new", pointer, (pointer, pointer)),
        ("EVP_PKEY_derive_init", ctypes.c_int, (pointer,)),
        ("EVP_PKEY_derive_set_peer", ctypes.c_int, (pointer, pointer)),
        ("EVP_PKEY_derive", ctypes.c_int, (pointer, ctypes.c_char_p, size)),
        ("EVP_PKEY_free", None, (pointer,)),
        ("EVP_PKEY_CTX_free", None, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returned, given
    return library
