"""Handshake: mutual challenge-response over a shared key, sans-IO. Every authenticated connection begins with it.

    listener -> dialer     challenge   a fresh nonce
    dialer   -> listener   hello       a fresh nonce, a proof, and claims
    listener -> dialer     accept      a proof, and claims; or
                           refuse      claims alone, which nothing proves

    proof of the dialer   = HMAC-SHA256(key, protocol, purpose, side, challenge, nonce, claims of the dialer)
    proof of the listener = the same of its side, and of its own claims in addition

Both nonces make a recorded message worthless; the side makes a reflected one worthless; the purpose separates the
protocols that use one token. The dialer proves itself first, so a stranger never gets a proof. The key never travels.

Claims are bytes that the user defines. Users and their claims:

    rpc (servers, elastic coordinator, telemetry, federated devices): version, run, recipe, layout and peer, from both
    ends, compared after the proofs; keys of the frames that follow are derived from the handshake
    mesh (fixed runs and elastic views): number of the meeting, caller and called, from the dialer
    meeting (rendezvous of a run): run, world, rank and addresses, from the dialer; a refusal has the reason

    magic  protocol  kind  flags  length  body        little endian
    4 s    u8        u8    u16    u32

A length is compared with a limit before its body is received. Timeouts belong to the users, which own the sockets.
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
CLAIMS_BYTES = 2**16  # the limit of claims, unless the user has another one
DIALER, LISTENER = b"dialer", b"listener"
_SHOWN_BYTES = 20  # of bytes that are no handshake
_HEADER = struct.Struct("<4sBBHI")
HEADER_BYTES = _HEADER.size


class HandshakeStep(IntEnum):
    """Kinds of messages, as on the wire."""

    CHALLENGE = 1
    HELLO = 2
    ACCEPT = 3
    REFUSE = 4


# Bytes of a body that are no claims
_FIXED_BYTES = {
    HandshakeStep.CHALLENGE: NONCE_BYTES,
    HandshakeStep.HELLO: NONCE_BYTES + PROOF_BYTES,
    HandshakeStep.ACCEPT: PROOF_BYTES,
    HandshakeStep.REFUSE: 0,
}


class WrongKeyError(ConnectError):
    """The other end did not prove that it holds the same key. claims: of that end, not proven."""

    def __init__(self, claims: bytes) -> None:
        super().__init__("The other end holds another token. Give all processes of a run the same token file.")
        self.claims = claims


def keyed_hash(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts with their lengths, so that no two lists of parts are the same text."""
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"gossamer", *parts))
    return hmac.digest(key, text, hashlib.sha256)


class Handshake:
    """One end. Send `output()` at the start and after each `receive`; read at most `wanted_bytes` more each time.

    Args:
        purpose: name of the protocol that the connection will speak.
        limit_bytes: the longest claims that are received.
    """

    def __init__(self, purpose: bytes, limit_bytes: int) -> None:
        self._purpose, self._limit_bytes = purpose, limit_bytes
        self._key = self._challenge = self._nonce = self._dialer_claims = self._listener_claims = b""
        self._received, self._outgoing = bytearray(), bytearray()
        self._expected: tuple[HandshakeStep, ...] = ()

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the current message still needs; 0 if no message is expected. Later bytes are not the
        handshake's."""
        if not self._expected:
            return 0
        length = self._length if len(self._received) >= HEADER_BYTES else 0
        return HEADER_BYTES + length - len(self._received)

    def output(self) -> bytes:
        """Bytes to send, each once; also after an error, before the connection is closed."""
        outgoing, self._outgoing = bytes(self._outgoing), bytearray()
        return outgoing

    def receive(self, data: bytes | memoryview) -> int:
        """Take bytes up to the end of the current message; returns how many.

        Raises:
            MalformedError: for bytes that are no handshake, or a length beyond the limit.
            MismatchError: if the other end has another protocol version.
            WrongKeyError: if the other end proves another key.
        """
        used = 0
        while used < len(data) and (wanted := self.wanted_bytes):
            part = bytes(data[used : used + wanted])
            self._received += part
            used += len(part)
            try:
                self._check_header()
            except GossamerError:
                self._expected = ()  # nothing more is read
                raise
            if not self.wanted_bytes:
                step, body = HandshakeStep(self._received[5]), bytes(self._received[HEADER_BYTES:])
                self._received.clear()
                self._process(step, body)
                break
        return used

    def derive_key(self, purpose: bytes, side: bytes) -> bytes:
        """A secret of this connection for what `side` sends (HKDF's expansion step; Krawczyk 2010, CRYPTO)."""
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
                f"What arrived begins with {bytes(self._received[:_SHOWN_BYTES])!r}, so it is no handshake of "
                "Gossamer's. Another program answers at this address, or calls here: give each its own port."
            )
        if len(self._received) < HEADER_BYTES:
            return
        _, protocol, step, flags, length = _HEADER.unpack_from(self._received)
        if protocol != PROTOCOL:
            self._send(HandshakeStep.REFUSE)  # its header has this end's version
            raise MismatchError(
                f"The other side speaks protocol {protocol} and this one {PROTOCOL}, so neither can read the other. "
                "Install the same version of Gossamer everywhere."
            )
        if flags or step not in self._expected:
            expected = " or ".join(each.name for each in self._expected)
            raise MalformedError(
                f"A handshake's message {step} with flags {flags} arrived where {expected} is expected. Is another "
                "program calling?"
            )
        fixed = _FIXED_BYTES[HandshakeStep(step)]
        most = fixed if step == HandshakeStep.CHALLENGE else fixed + self._limit_bytes
        if not fixed <= length <= most:
            raise MalformedError(
                f"A handshake's message announces {length} bytes where {fixed} to {most} are agreed on, so it is not "
                "read."
            )

    def _send(self, step: HandshakeStep, body: bytes = b"") -> None:
        self._outgoing += _HEADER.pack(MAGIC, PROTOCOL, step, 0, len(body)) + body

    def _proof(self, side: bytes, *claims: bytes) -> bytes:
        return self._hash(b"proof", side, *claims)

    def _hash(self, purpose: bytes, side: bytes, *claims: bytes) -> bytes:
        version = bytes([PROTOCOL])
        return keyed_hash(self._key, version, self._purpose, purpose, side, self._challenge, self._nonce, *claims)


class Dialer(Handshake):
    """The end that dialed. It is done when `accepted` or `refused` is set: the claims of the listener.

    `accepted` claims are proven; `refused` ones are not.
    """

    def __init__(self, purpose: bytes, key: bytes, claims: bytes, *, limit_bytes: int = CLAIMS_BYTES) -> None:
        super().__init__(purpose, limit_bytes)
        self._key, self._dialer_claims = key, claims
        self._expected = (HandshakeStep.CHALLENGE,)
        self.accepted: bytes | None = None
        self.refused: bytes | None = None

    def _process(self, step: HandshakeStep, body: bytes) -> None:
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

    The claims may say which key is to be proven, so the key is given to `accept`.
    """

    def __init__(self, purpose: bytes, *, limit_bytes: int = CLAIMS_BYTES) -> None:
        super().__init__(purpose, limit_bytes)
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._send(HandshakeStep.CHALLENGE, self._challenge)
        self._expected = (HandshakeStep.HELLO,)
        self._received_proof = b""
        self.claims: bytes | None = None  # of the dialer; not proven before `accept` or `is_proven`

    def _process(self, step: HandshakeStep, body: bytes) -> None:
        self._expected = ()
        self._nonce, rest = body[:NONCE_BYTES], body[NONCE_BYTES:]
        self._received_proof, self.claims = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        self._dialer_claims = self.claims

    def is_proven(self, key: bytes) -> bool:
        """Whether the dialer has proven this key."""
        self._key = key
        return self.claims is not None and hmac.compare_digest(self._received_proof, self._proof(DIALER, self.claims))

    def accept(self, key: bytes, claims: bytes = b"") -> None:
        """Prove the key, and tell this end's claims. Raises WrongKeyError, without a proof, if the dialer has not."""
        if not self.is_proven(key):
            raise WrongKeyError(self.claims or b"")
        self._listener_claims = claims
        self._send(HandshakeStep.ACCEPT, self._proof(LISTENER, self._dialer_claims, claims) + claims)

    def refuse(self, claims: bytes = b"") -> None:
        """Tell why this end refuses the dialer. It proves nothing."""
        self._send(HandshakeStep.REFUSE, claims)
