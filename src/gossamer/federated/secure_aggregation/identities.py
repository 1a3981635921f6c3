"""IdentityRoster: the identities of a federation's devices, Ed25519 keys pinned by a file, and their signatures.

A roster file has one line per device: its number and its public key in base 64. Lines that begin with # are comments.
The server and all devices read the same file, so that the server cannot substitute its own devices.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gossamer.base import system
from gossamer.errors import AttachError, MalformedError
from gossamer.federated.secure_aggregation.masking import require_cryptography

IDENTITY_BYTES = 32
SIGNATURE_BYTES = 64


@dataclass(frozen=True)
class Identity:
    """A device's private key, which never leaves it."""

    _private: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Identity:
        require_cryptography()
        return cls(os.urandom(IDENTITY_BYTES))

    @classmethod
    def kept_at(cls, path: str | os.PathLike[str]) -> Identity:
        """Read a private key from a file, or create one readable only by its owner.

        Raises:
            AttachError: the file is no private key, or the package `cryptography` is not installed.
            OSError: the file cannot be read, or not be written completely. It is then removed.
        """
        found = cls.new()
        try:
            file = system.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            read = Path(path).read_bytes()
            if len(read) != IDENTITY_BYTES:
                raise AttachError(
                    f"{path} is no identity: it has {len(read)} bytes, not {IDENTITY_BYTES}. Name the file that this "
                    "device wrote, or remove it and enroll the device again"
                ) from None
            return cls(read)
        try:
            with file:
                system.write_all(file, found._private)
        except OSError:
            os.unlink(path)  # or it would be refused later, as a file that is no identity
            raise
        return found

    @property
    def public(self) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._private).public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._private).sign(message)


@dataclass(frozen=True)
class IdentityRoster:
    """Public keys of devices, by number."""

    keys: Mapping[int, bytes]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> IdentityRoster:
        """Read a roster file. Raises AttachError, naming the line, also for a file that is no text."""
        keys: dict[int, bytes] = {}
        seen: set[bytes] = set()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise AttachError(
                f"{path} is no roster: it is not text. A roster has a line for each device, with its number and its "
                "public key in base 64; a private key is the file of --identity"
            ) from None
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                client, key = int(words[0]), base64.b64decode(words[1], validate=True)
            except (ValueError, IndexError, binascii.Error):
                client, key = -1, b""
            if client < 0 or len(key) != IDENTITY_BYTES or client in keys or key in seen or len(words) != 2:
                raise AttachError(
                    f"line {number} of the roster {path} is invalid: write a device's number and its public key in "
                    "base 64, each of them once"
                )
            keys[client] = key
            seen.add(key)
        return cls(keys)

    @staticmethod
    def line(client: int, public: bytes) -> str:
        """A line of a roster file."""
        return f"{client} {base64.b64encode(public).decode()}\n"

    def public(self, client: int) -> bytes:
        """Raises MalformedError for a device that is not enrolled."""
        try:
            return self.keys[client]
        except KeyError:
            raise MalformedError(f"client {client} is not in the roster, so its signatures are invalid") from None

    def signed(self, client: int, message: bytes, signature: bytes) -> bool:
        """Whether the signature is valid."""
        require_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.public(client)).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def check(self, client: int, message: bytes, signature: bytes, what: str = "keys") -> None:
        """Raises MalformedError, naming the client, unless it signed the message; `what` names the message."""
        if not self.signed(client, message, signature):
            raise MalformedError(
                f"{what} of client {client} are not signed by its identity in the roster for this round: they are "
                "another device's, or of another round"
            )

    def identity(self, client: int) -> Identity | None:
        """The private key of a device, in simulations; else None."""
        return None


@dataclass(frozen=True)
class SimulatedRoster(IdentityRoster):
    """Identities of any number of devices, derived from a seed, for simulations in one process."""

    keys: Mapping[int, bytes] = field(default_factory=dict)
    seed: int = 0

    def public(self, client: int) -> bytes:
        return _simulated(self.seed, client)[1]

    def identity(self, client: int) -> Identity:
        return _simulated(self.seed, client)[0]


@lru_cache(maxsize=1 << 14)
def _simulated(seed: int, client: int) -> tuple[Identity, bytes]:
    identity = Identity(hashlib.sha256(f"simulated identity {seed} {client}".encode()).digest())
    return identity, identity.public
