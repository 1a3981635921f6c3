"""Handshake: mutual challenge-response over a shared key, sans-IO. Every authenticated connection begins with it.

    listener -> dialer     challenge   a random nonce
    dialer   -> listener   hello       a random nonce, a proof, and claims
    listener -> dialer     accept      a proof, and claims; or
                           refuse      claims alone, which are unproven

Dialer and listener are roles, which usually follow from who opened the connection. If the listener opens it, or both
ends open it at the same time, the listener sends before its challenge

    listener -> dialer     knock       claims, which are unproven

An end that accepts a connection cannot know this, so it sends a challenge, too, which a listener that knocks ignores.

    proof of the dialer   = HMAC-SHA256(key, protocol, purpose, side, challenge, nonce, claims of the dialer)
    proof of the listener = the same with its side, and also its own claims

The nonces prevent replay, the side prevents reflection, and the purpose separates the protocols that use one token. The
dialer proves itself first, so an unauthenticated peer never receives a proof. The key is never sent.

Claims are bytes that the caller defines. Users and their claims:

    rpc (servers, elastic coordinator, telemetry, federated devices): version, run, recipe, layout and peer, from both
    ends, compared after the proofs; keys of the following frames are derived from the handshake
    mesh (fixed runs and elastic views): number of the meeting, caller and called, from the dialer and in a knock; in
    runs with a relay also a public key, from both ends
    meeting (rendezvous of a run): run, world, rank and addresses, from the dialer; a refusal has the reason

    magic  protocol  kind  flags  length  body        little endian
    4 s    u8        u8    u16    u32

A length is checked against a limit before its body is received. Callers own the sockets and their timeouts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from enum import IntEnum

from gossamer.errors import ConnectError, GossamerError, MalformedError, MismatchError

MAGIC = b"GSMR"
PROTOCOL = 3
NONCE_BYTES = PROOF_BYTES = 32
CLAIMS_BYTES = 2**16  # default limit of claims
DIALER, LISTENER = b"dialer", b"listener"
_SHOWN_BYTES = 20  # of an invalid handshake
_HEADER = struct.Struct("<4sBBHI")
HEADER_BYTES = _HEADER.size


class HandshakeStep(IntEnum):
    """Kinds of messages, as on the wire."""

    CHALLENGE = 1
    HELLO = 2
    ACCEPT = 3
    REFUSE = 4
    KNOCK = 5


# Bytes of a body in addition to claims
_FIXED_BYTES = {
    HandshakeStep.CHALLENGE: NONCE_BYTES,
    HandshakeStep.HELLO: NONCE_BYTES + PROOF_BYTES,
    HandshakeStep.ACCEPT: PROOF_BYTES,
    HandshakeStep.REFUSE: 0,
    HandshakeStep.KNOCK: 0,
}


class WrongKeyError(ConnectError):
    """The peer did not prove that it has the same key. claims: the peer's, unproven."""

    def __init__(self, claims: bytes) -> None:
        super().__init__("The peer has another token. Give all processes of a run the same token file.")
        self.claims = claims


def keyed_hash(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts with their lengths, so that different lists of parts have different inputs."""
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"gossamer", *parts))
    return hmac.digest(key, text, hashlib.sha256)


class Handshake:
    """One end. Send `output()` at the start and after each `receive`; read at most `wanted_bytes` more each time.

    Args:
        purpose: Name of the protocol that follows on the connection.
        limit_bytes: Maximum size of received claims.
    """

    def __init__(self, purpose: bytes, limit_bytes: int) -> None:
        self._purpose, self._limit_bytes = purpose, limit_bytes
        self._key = self._challenge = self._nonce = self._dialer_claims = self._listener_claims = b""
        self._received, self._outgoing = bytearray(), bytearray()
        self._expected: tuple[HandshakeStep, ...] = ()

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the current message still needs; 0 if no message is expected. Later bytes are not part of the
        handshake."""
        if not self._expected:
            return 0
        length = self._length if len(self._received) >= HEADER_BYTES else 0
        return HEADER_BYTES + length - len(self._received)

    def output(self) -> bytes:
        """Return bytes to send, each once; also call it after an error, before closing the connection."""
        outgoing, self._outgoing = bytes(self._outgoing), bytearray()
        return outgoing

    def receive(self, data: bytes | memoryview) -> int:
        """Process bytes up to the end of the current message, and return their number.

        Raises:
            MalformedError: The data is not a handshake, or a length exceeds the limit.
            MismatchError: The peer has another protocol version.
            WrongKeyError: The peer proves another key.
        """
        used = 0
        while used < len(data) and (wanted := self.wanted_bytes):
            part = bytes(data[used : used + wanted])
            self._received += part
            used += len(part)
            try:
                self._check_header()
            except GossamerError:
                self._expected = ()  # no more bytes are read
                raise
            if not self.wanted_bytes:
                step, body = HandshakeStep(self._received[5]), bytes(self._received[HEADER_BYTES:])
                self._received.clear()
                self._process(step, body)
                break
        return used

    def derive_key(self, purpose: bytes, side: bytes) -> bytes:
        """Derive a key of this connection for data from `side` (HKDF's expansion step; Krawczyk 2010, CRYPTO)."""
        return self._hash(purpose, side, self._dialer_claims, self._listener_claims)

    def _process(self, step: HandshakeStep, body: bytes) -> None:
        raise NotImplementedError

    @property
    def _length(self) -> int:
        return int(_HEADER.unpack_from(self._received)[4])

    def _check_header(self) -> None:
        start = bytes(self._received[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise MalformedError(
                f"The received data begins with {bytes(self._received[:_SHOWN_BYTES])!r}, so it is not a handshake of "
                "Gossamer. Another program uses this address: give each program its own port."
            )
        if len(self._received) < HEADER_BYTES:
            return
        _, protocol, step, flags, length = _HEADER.unpack_from(self._received)
        if protocol != PROTOCOL:
            self._send(HandshakeStep.REFUSE)  # its header has this end's version
            raise MismatchError(
                f"The peer uses protocol {protocol}, this process protocol {PROTOCOL}. "
                "Install the same version of Gossamer everywhere."
            )
        if flags or step not in self._expected:
            expected = " or ".join(each.name for each in self._expected)
            raise MalformedError(
                f"Received handshake message {step} with flags {flags}, expected {expected}. Check whether another "
                "program uses this address."
            )
        fixed = _FIXED_BYTES[HandshakeStep(step)]
        most = fixed if step == HandshakeStep.CHALLENGE else fixed + self._limit_bytes
        if not fixed <= length <= most:
            raise MalformedError(
                f"A handshake message announces {length} bytes, expected {fixed} to {most}, so it is not read."
            )

    def _send(self, step: HandshakeStep, body: bytes = b"") -> None:
        self._outgoing += _HEADER.pack(MAGIC, PROTOCOL, step, 0, len(body)) + body

    def _proof(self, side: bytes, *claims: bytes) -> bytes:
        return self._hash(b"proof", side, *claims)

    def _hash(self, purpose: bytes, side: bytes, *claims: bytes) -> bytes:
        version = bytes([PROTOCOL])
        return keyed_hash(self._key, version, self._purpose, purpose, side, self._challenge, self._nonce, *claims)


class Dialer(Handshake):
    """The end that dialed. It is complete when `accepted` or `refused` is set: the claims of the listener.

    `accepted` claims are proven; `refused` claims are not. takes_knocks: whether the listener may knock first.
    """

    def __init__(
        self,
        purpose: bytes,
        key: bytes,
        claims: bytes,
        *,
        limit_bytes: int = CLAIMS_BYTES,
        takes_knocks: bool = False,
    ) -> None:
        super().__init__(purpose, limit_bytes)
        self._key, self._dialer_claims = key, claims
        self._expected = (HandshakeStep.CHALLENGE, *[HandshakeStep.KNOCK] * takes_knocks)
        self.accepted: bytes | None = None
        self.refused: bytes | None = None

    @property
    def was_challenged(self) -> bool:
        """Whether the listener is there. The next output proves this end."""
        return bool(self._challenge)

    def _process(self, step: HandshakeStep, body: bytes) -> None:
        if step is HandshakeStep.KNOCK:
            self._expected = (HandshakeStep.CHALLENGE,)
            return
        if step is HandshakeStep.CHALLENGE:
            self._challenge, self._nonce = body, secrets.token_bytes(NONCE_BYTES)
            proof = self._proof(DIALER, self._dialer_claims)
            self._send(HandshakeStep.HELLO, self._nonce + proof + self._dialer_claims)
            self._expected = (HandshakeStep.ACCEPT, HandshakeStep.REFUSE)
            return
        self._expected = ()
        if step is HandshakeStep.REFUSE:
            self.refused = body
            return
        proof, self._listener_claims = body[:PROOF_BYTES], body[PROOF_BYTES:]
        expected = self._proof(LISTENER, self._dialer_claims, self._listener_claims)
        if not hmac.compare_digest(proof, expected):
            raise WrongKeyError(self._listener_claims)
        self.accepted = self._listener_claims


class Listener(Handshake):
    """The end that accepted a connection. When `claims` is set, call `accept` or `refuse`, now or later.

    `accept` receives the key, because the claims may determine which key to use.

    Args:
        purpose: Name of the protocol that follows on the connection.
        limit_bytes: Maximum size of received claims.
        knock: Claims of a knock, if this end has opened the connection.
        takes_knocks: Whether the other end may knock. Then `knocked` is set, and this end has to become the dialer.
    """

    def __init__(
        self,
        purpose: bytes,
        *,
        limit_bytes: int = CLAIMS_BYTES,
        knock: bytes | None = None,
        takes_knocks: bool = False,
    ) -> None:
        super().__init__(purpose, limit_bytes)
        if knock is not None:
            self._send(HandshakeStep.KNOCK, knock)
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._send(HandshakeStep.CHALLENGE, self._challenge)
        also = [HandshakeStep.CHALLENGE] * (knock is not None) + [HandshakeStep.KNOCK] * takes_knocks
        self._expected = (HandshakeStep.HELLO, *also)
        self._received_proof = b""
        self.knocked: bytes | None = None  # claims of the other end's knock, unproven
        self.claims: bytes | None = None  # of the dialer; unproven before `accept` or `is_proven`

    def _process(self, step: HandshakeStep, body: bytes) -> None:
        if step is HandshakeStep.CHALLENGE:
            self._expected = (HandshakeStep.HELLO,)
            return
        self._expected = ()
        if step is HandshakeStep.KNOCK:
            self.knocked = body
            return
        self._nonce, rest = body[:NONCE_BYTES], body[NONCE_BYTES:]
        self._received_proof, self.claims = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        self._dialer_claims = self.claims

    def is_proven(self, key: bytes) -> bool:
        """Whether the dialer has proven this key."""
        self._key = key
        return self.claims is not None and hmac.compare_digest(self._received_proof, self._proof(DIALER, self.claims))

    def accept(self, key: bytes, claims: bytes = b"") -> None:
        """Prove the key and send claims. Raises WrongKeyError, without a proof, if the dialer has another key."""
        if not self.is_proven(key):
            raise WrongKeyError(self.claims or b"")
        self._listener_claims = claims
        self._send(HandshakeStep.ACCEPT, self._proof(LISTENER, self._dialer_claims, claims) + claims)

    def refuse(self, claims: bytes = b"") -> None:
        """Send the reason for refusing the dialer, without a proof."""
        self._send(HandshakeStep.REFUSE, claims)
