"""Greeting: a mutual challenge-response between two members of one meeting, over a key that only its members know.

    listener -> caller      challenge: a fresh nonce
    caller   -> listener    hello: meeting, caller, called, a fresh nonce, proof
    listener -> caller      proof = HMAC-SHA256(key, direction, challenge, meeting, caller, called, nonce)

A proof covers both nonces, both numbers, the meeting and its direction: one that was recorded before, or elsewhere, or
comes from the other end itself, proves nothing. The listener proves itself last, and to members only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, replace

from gossamer.errors import MalformedError

NONCE_BYTES = PROOF_BYTES = 32
PROTOCOL = b"gossamer"
HELLO = struct.Struct(f"!8sQQQ{NONCE_BYTES}s{PROOF_BYTES}s")
CALLER, CALLED = b"caller", b"called"


def greeting_key(token: bytes, secret: bytes) -> bytes:
    """The key of one meeting, from the run's token and what only this meeting's members were told."""
    return hmac.digest(token, b"gossamer greeting" + secret, hashlib.sha256)


@dataclass(frozen=True, kw_only=True)
class CallerHello:
    """What a caller claims, and its proof."""

    meeting: int  # the number of the meeting that it means, as the other three of 64 bits
    caller: int
    called: int
    nonce: bytes
    proof: bytes = bytes(PROOF_BYTES)

    @classmethod
    def to(cls, called: int, *, caller: int, meeting: int, key: bytes, challenge: bytes) -> CallerHello:
        """The answer to a challenge, with a fresh nonce."""
        said = cls(meeting=meeting, caller=caller, called=called, nonce=secrets.token_bytes(NONCE_BYTES))
        return replace(said, proof=said.proof_of(CALLER, key, challenge))

    @classmethod
    def of(cls, data: bytes) -> CallerHello:
        """Read what `data` wrote. Raises MalformedError for what was not written by this protocol."""
        try:
            protocol, meeting, caller, called, nonce, proof = HELLO.unpack(data)
        except struct.error as problem:
            raise MalformedError(f"this is no greeting ({problem})") from None
        if protocol != PROTOCOL:
            raise MalformedError("this is no greeting: another program calls")
        return cls(meeting=meeting, caller=caller, called=called, nonce=nonce, proof=proof)

    @property
    def data(self) -> bytes:
        return HELLO.pack(PROTOCOL, self.meeting, self.caller, self.called, self.nonce, self.proof)

    def is_proven(self, key: bytes, challenge: bytes) -> bool:
        return hmac.compare_digest(self.proof, self.proof_of(CALLER, key, challenge))

    def is_answered(self, answer: bytes, key: bytes, challenge: bytes) -> bool:
        """Whether `answer` proves that who was called holds the key."""
        return hmac.compare_digest(answer, self.proof_of(CALLED, key, challenge))

    def proof_of(self, who: bytes, key: bytes, challenge: bytes) -> bytes:
        """The proof of one end: CALLER or CALLED."""
        said = replace(self, proof=bytes(PROOF_BYTES)).data
        return hmac.digest(key, who + challenge + said, hashlib.sha256)
