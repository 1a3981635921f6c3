"""Masking: integers with sums that cannot overflow, pseudorandom masks, key agreement, and secret sharing.

X25519, HKDF, ChaCha20 and ChaCha20-Poly1305 are from the package `cryptography`, imported when needed."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.errors import AttachError, MalformedError, require

Integers = npt.NDArray[np.int64]
RingVector = npt.NDArray[Any]  # of the ring's unsigned dtype
ByteVector = npt.NDArray[np.uint8]

MOST_BITS = 64


@dataclass(frozen=True)
class SumRing:
    """Integers modulo 2^width, stored in the smallest unsigned type with enough bits.

    A summand is between -(2^(bits-1) - 1) and 2^(bits-1) - 1, so the magnitude of a sum is at most
    summands (2^(bits-1) - 1). `width` is the bits of that bound plus a sign bit, at most bits + ceil(log2(summands)).
    Sums therefore cannot overflow, also if devices drop out.
    """

    bits: int
    summands: int

    def __post_init__(self) -> None:
        require(self.bits >= 2 and self.summands >= 1, f"{self.summands} summands of {self.bits} bits have no sum")
        require(self.width <= MOST_BITS, f"sums of {self.summands} numbers of {self.bits} bits leave 64 bits")

    @property
    def largest(self) -> int:
        """Largest magnitude of a summand."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        return 1 + (self.summands * self.largest).bit_length()

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.width <= 16 else np.uint32 if self.width <= 32 else np.uint64)

    def wrapped(self, integers: Integers) -> RingVector:
        """(n,) summands as ring elements. Raises ValueError for one that is too large."""
        if len(integers) and max(-int(integers.min()), int(integers.max())) > self.largest:
            raise ValueError(f"a summand has a magnitude above {self.largest}, so sums could overflow")
        return integers.astype(self.dtype)

    def centered(self, total: RingVector) -> Integers:
        """(n,) the signed sums that ring elements represent, between -2^(width-1) and 2^(width-1)."""
        shift = MOST_BITS - self.width
        return (total.astype(np.uint64) << np.uint64(shift)).view(np.int64) >> np.int64(shift)

    def wire_bytes(self, count: int) -> int:
        """Bytes of `count` packed elements: width / 8 each, rounded up once per bit plane of a partial byte."""
        whole, rest = divmod(self.width, 8)
        return whole * count + rest * -(-count // 8)

    def packed(self, vector: RingVector) -> ByteVector:
        """The lowest `width` bits of each element: whole bytes plane by plane, then the remaining bits bit by bit."""
        whole, rest = divmod(self.width, 8)
        planes = np.ascontiguousarray(vector).view(np.uint8).reshape(len(vector), vector.itemsize)
        out = np.empty(self.wire_bytes(len(vector)), np.uint8)
        for plane in range(whole):
            out[plane * len(vector) : (plane + 1) * len(vector)] = planes[:, plane]
        place = whole * len(vector)
        for bit in range(rest):
            packed = np.packbits(planes[:, whole] >> bit & 1)
            out[place : place + len(packed)] = packed
            place += len(packed)
        return out

    def unpacked(self, packed: ByteVector, count: int) -> RingVector:
        """`count` elements from their packed bytes. Raises MalformedError for another number of bytes."""
        if packed.dtype != np.uint8 or packed.shape != (self.wire_bytes(count),):
            raise MalformedError(
                f"{count} masked numbers of {self.width} bits are {self.wire_bytes(count)} bytes, but "
                f"{packed.shape} of {packed.dtype} arrived"
            )
        whole, rest = divmod(self.width, 8)
        vector = np.zeros(count, self.dtype)
        planes = vector.view(np.uint8).reshape(count, vector.itemsize)
        for plane in range(whole):
            planes[:, plane] = packed[plane * count : (plane + 1) * count]
        place, step = whole * count, -(-count // 8)
        for bit in range(rest):
            planes[:, whole] |= np.unpackbits(packed[place : place + step], count=count) << bit
            place += step
        return vector


KEY_BYTES = 32
TAG_BYTES = 16
CHUNK_BYTES = 1 << 18  # generated at a time, to fit into the L2 cache
_ZEROS = bytes(CHUNK_BYTES)
_NONCE = bytes(12)  # each sealing key encrypts once


@cache
def require_cryptography() -> None:
    """Raises AttachError if the package is not installed."""
    try:
        import_module("cryptography.hazmat.primitives.asymmetric.x25519")
    except ImportError as error:
        raise AttachError(
            "Secure aggregation uses the package `cryptography` for key agreement and masks, but it is not "
            "installed. Run: pip install 'gossamer[federated]'"
        ) from error


class AgreementKey:
    """An X25519 private key."""

    def __init__(self, private: bytes | None = None) -> None:
        """private: 32 bytes; None: random. Raises AttachError if the package is not installed."""
        require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    def agreed(self, public: bytes, purpose: bytes) -> bytes:
        """The shared key of both owners for a purpose: HKDF-SHA256 of X25519. Raises MalformedError."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise MalformedError(f"invalid public key for key agreement ({error})") from error
        return HKDF(hashes.SHA256(), KEY_BYTES, None, purpose).derive(secret)


def commitment(seed: bytes) -> bytes:
    """A binding and hiding commitment to a seed of 256 random bits."""
    return hashlib.sha256(b"gossamer secure self mask" + seed).digest()


def sealed(key: bytes, plain: bytes, purpose: bytes) -> bytes:
    """Encrypt and authenticate; the result is TAG_BYTES longer. A key must encrypt only once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_NONCE, plain, purpose)


def opened(key: bytes, sealed_bytes: bytes, purpose: bytes) -> bytes | None:
    """Decrypt; None if the message was changed or encrypted with another key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed_bytes, purpose)
    except InvalidTag:
        return None


class KeyStream:
    """The ChaCha20 stream of a single-use key, in pieces of at most CHUNK_BYTES."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def fill(self, out: bytearray | memoryview) -> None:
        self._encryptor.update_into(memoryview(_ZEROS)[: len(out)], out)


def add_mask(vector: RingVector, key: bytes, sign: int) -> None:
    """vector += sign PRG(key), in place. sign: 1 or -1; key: 256 bits, single-use."""
    stream, buffer = KeyStream(key), bytearray(CHUNK_BYTES)
    each = CHUNK_BYTES // vector.itemsize
    apply = np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), each):
        piece = vector[start : start + each]
        stream.fill(memoryview(buffer)[: piece.nbytes])
        apply(piece, np.frombuffer(buffer, vector.dtype, len(piece)), out=piece)


def pairwise_sign(own: int, other: int) -> int:
    """Sign of the pairwise mask: one device adds it and the other subtracts it."""
    return 1 if own < other else -1


SECRET_BYTES = 32
SHARE_BYTES = 33
PRIME = 2**256 + 297  # the smallest prime above all secrets


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """Shamir secret sharing: shares of SHARE_BYTES for each place.

    A share is the value at its place of a random polynomial over the prime field of PRIME with the secret as its value
    at 0. Any `threshold` shares recover the secret; fewer reveal nothing.
    source: Shamir 1979, Communications of the ACM

    Args:
        secret: SECRET_BYTES bytes.
        threshold: number of shares that recover the secret.
        places: distinct and above 0.

    Returns:
        The shares, by place.

    Raises:
        ValueError: an argument is out of range.
    """
    require(len(secret) == SECRET_BYTES, f"a secret must have {SECRET_BYTES} bytes, got {len(secret)}")
    require(
        0 < threshold <= len(set(places)) == len(places) and min(places) > 0,
        f"{threshold} of {len(places)} shares cannot recover a secret: places must be distinct and above 0",
    )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Recover a secret from at least `threshold` shares by place. Too few or wrong shares give other 32 bytes.

    Raises MalformedError for a share outside the field, or if no secret has these shares.
    """
    secret = _interpolated(shares, 0)
    if secret.bit_length() > 8 * SECRET_BYTES:
        raise MalformedError(f"shares at the places {sorted(shares)} belong to no secret: one of them was changed")
    return secret.to_bytes(SECRET_BYTES, "big")


def share_at(shares: Mapping[int, bytes], place: int) -> bytes:
    """Compute the share at another place from at least `threshold` shares. Raises MalformedError."""
    return _interpolated(shares, place).to_bytes(SHARE_BYTES, "big")


def _interpolated(shares: Mapping[int, bytes], at: int) -> int:
    places = tuple(sorted(shares))
    values = [_number(place, shares[place]) for place in places]
    return sum(value * weight for value, weight in zip(values, _weights(places, at), strict=True)) % PRIME


def _value(coefficients: Sequence[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total


def _number(place: int, share: bytes) -> int:
    number = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or number >= PRIME:
        raise MalformedError(f"invalid Shamir share at place {place}")
    return number


@lru_cache(maxsize=256)
def _weights(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange coefficients, cached since the same holders share many secrets."""
    weights = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * (other - at) % PRIME, below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
