"""Primitives: key agreement, derivation, streams and sealing, of the package `cryptography`, imported when needed."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import import_module

from gossamer.errors import AttachError, MalformedError

KEY_BYTES = 32
TAG_BYTES = 16
CHUNK_BYTES = 1 << 18  # of a stream at a time: stays in the second cache
_ZEROS = bytes(CHUNK_BYTES)
_NONCE = bytes(12)  # every sealing key seals once


@cache
def require_cryptography() -> None:
    """Raises AttachError where the package is not installed."""
    try:
        import_module("cryptography.hazmat.primitives.asymmetric.x25519")
    except ImportError as error:
        raise AttachError(
            "Secure aggregation agrees on keys and makes masks by the package `cryptography`, and it is not "
            "installed. Run: pip install 'gossamer[federated]'"
        ) from error


class AgreementKey:
    """A private key of X25519."""

    def __init__(self, private: bytes | None = None) -> None:
        """private: 32 bytes; None: drawn. Raises AttachError where the package is not installed."""
        require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    def agreed(self, public: bytes, purpose: bytes) -> bytes:
        """The key that the owners of both have for a purpose: HKDF-SHA256 of X25519. Raises MalformedError."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise MalformedError(f"a public key is none that keys can be agreed with ({error})") from error
        return HKDF(hashes.SHA256(), KEY_BYTES, None, purpose).derive(secret)


def commitment(seed: bytes) -> bytes:
    """What binds to a seed of 256 random bits and tells nothing of it."""
    return hashlib.sha256(b"gossamer secure self mask" + seed).digest()


def sealed(key: bytes, plain: bytes, purpose: bytes) -> bytes:
    """Encrypted and authenticated, TAG_BYTES longer. A key seals once."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_NONCE, plain, purpose)


def opened(key: bytes, sealed_bytes: bytes, purpose: bytes) -> bytes | None:
    """What was sealed; None where it was changed, or sealed by another key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed_bytes, purpose)
    except InvalidTag:
        return None


class KeyStream:
    """ChaCha20's stream under a key that is used once, in pieces of at most CHUNK_BYTES."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def fill(self, out: bytearray | memoryview) -> None:
        self._encryptor.update_into(memoryview(_ZEROS)[: len(out)], out)
