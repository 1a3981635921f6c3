"""Authentication handshake: mutual challenge-response over a shared token, then a comparison of run, recipe and layout.

    dialer   -> listener    hello: version, run, recipe, layout, own name, the dialed peer's, a fresh nonce
    listener -> dialer      hello, proof
    dialer   -> listener    proof                proof = HMAC-SHA256(token, direction, both hellos)

A proof covers both hellos with their nonces, and its direction: replayed or reflected ones prove nothing. Settings are
compared after the proof, at both ends, so both can name both values. Frames that follow count up and carry tags by keys
derived from the same secret and both hellos, one for each direction (frame_mac): whoever controls the network can cut a
connection, but not change, repeat, reorder or leave out what travels through it; it can read it, which `tls` prevents.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from gossamer.base.kernels import polyval
from gossamer.base.kernels.polyval import PolyvalKey
from gossamer.base.peer_ops import Peer
from gossamer.comm.wire.frame_mac import FrameMac
from gossamer.comm.wire.frames import Kind, Message
from gossamer.comm.wire.messages import HelloRecord, ProofRecord, Record, encode_record
from gossamer.errors import ConnectError, GossamerError, MalformedError, MismatchError, PeerLost
from gossamer.version import __version__

DIALER, LISTENER = b"dialler", b"listener"
SHOWN_CHARACTERS = 100  # of a text that an unauthenticated peer sent

COMPARED = {
    "gossamer": "Gossamer's version (install the same one everywhere)",
    "run": "the run (give every process of a run the same name)",
    "recipe": "the recipe (pass the same one everywhere)",
    "layout": "a hash of the parameters' names, shapes and dtypes (build the same model everywhere)",
    "largest_frame_bytes": "the size that no frame exceeds (pass the same largest_frame_bytes everywhere)",
}


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Identity of a process, and the settings that must be alike everywhere (else MismatchError, with both values)."""

    me: Peer
    token: bytes = field(repr=False)  # 32 secret bytes that all processes of a run hold
    run: str  # alike everywhere, as all that follows but the instance
    recipe: str = ""
    layout: str = ""
    largest_frame_bytes: int  # a longer frame is refused before any memory is allocated for it
    accepted_frame_bytes: int | None = None  # the same for what this end receives, not compared; None: that
    gossamer: str = __version__
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))  # drawn anew at each start

    def hello(self, you: Peer) -> HelloRecord:
        return HelloRecord(
            gossamer=self.gossamer,
            run=self.run,
            recipe=self.recipe,
            layout=self.layout,
            me=(self.me.kind, self.me.number),
            you=(you.kind, you.number),
            instance=self.instance,
            nonce=secrets.token_bytes(32),
            largest_frame_bytes=self.largest_frame_bytes,
            polyval=polyval.available(),
        )


class AuthenticatedPeer(NamedTuple):
    """The peer at the other end, once it has proven the token."""

    peer: Peer
    instance: bytes  # of its process
    limit_bytes: int  # of a frame that comes from it
    sending_epoch: int
    receiving_epoch: int
    sending_mac: FrameMac
    receiving_mac: FrameMac


class Handshake:
    """One end of the handshake. Send what `begin` and `receive` return, until `authenticated` or `refusal` is set.

    dialed_peer: None for the listener. A refused dialer still sends its proof, so that the listener learns whom it
    refused.
    """

    def __init__(self, credentials: Credentials, dialed_peer: Peer | None) -> None:
        self._credentials, self._me, self._dialed_peer = credentials, credentials.me, dialed_peer
        self._sent_hello = self._received_hello = b""
        self._their_hello: HelloRecord | None = None
        self.authenticated: AuthenticatedPeer | None = None
        self.refusal: GossamerError | None = None

    def begin(self) -> list[Message]:
        return [] if self._dialed_peer is None else [self._hello(self._dialed_peer)]

    def receive(self, record: Record, control: bytes) -> list[Message]:
        match record:
            case HelloRecord() if self._their_hello is None:
                return self._receive_hello(record, control)
            case ProofRecord() if self._their_hello is not None and self.authenticated is None:
                return self._receive_proof(record, self._their_hello)
        raise MalformedError(
            f"{self._me} received a {type(record).__name__} where a handshake stands. Is another program calling?"
        )

    def _hello(self, you: Peer) -> Message:
        message = encode_record(Kind.HELLO, self._credentials.hello(you))
        self._sent_hello = message.control
        return message

    def _receive_hello(self, their_hello: HelloRecord, control: bytes) -> list[Message]:
        self._their_hello, self._received_hello = their_hello, control
        them = Peer(*their_hello.me)
        if Peer(*their_hello.you) != self._me or them != (self._dialed_peer or them) or them == self._me:
            how = "was called" if self._dialed_peer is None else f"called {self._dialed_peer} and was answered"
            raise PeerLost(
                f"{self._me} {how} by {them}, who wanted {Peer(*their_hello.you)}: somebody's address has changed."
            )
        if self._dialed_peer is not None:
            return []
        return [self._hello(them), self._proof(LISTENER)]

    def _receive_proof(self, proof: ProofRecord, their_hello: HelloRecord) -> list[Message]:
        if not hmac.compare_digest(proof.mac, self._mac(b"proof", self._their_side)):
            raise ConnectError(
                f"{Peer(*their_hello.me)} holds another token than {self._me}, so neither can trust the other. It "
                f"says that it belongs to run {their_hello.run[:SHOWN_CHARACTERS]!r}, and this is run "
                f"{self._credentials.run!r}: give all processes of a run the same token, and each run its own ports."
            )
        self.refusal = self._difference(their_hello)
        self.authenticated = AuthenticatedPeer(
            peer=Peer(*their_hello.me),
            instance=their_hello.instance,
            limit_bytes=(
                self._credentials.largest_frame_bytes
                if self._credentials.accepted_frame_bytes is None
                else self._credentials.accepted_frame_bytes
            ),
            sending_epoch=self._epoch(self._my_side),
            receiving_epoch=self._epoch(self._their_side),
            sending_mac=self._frame_mac(self._my_side, their_hello),
            receiving_mac=self._frame_mac(self._their_side, their_hello),
        )
        return [] if self._dialed_peer is None else [self._proof(DIALER)]

    def _difference(self, their_hello: HelloRecord) -> MismatchError | None:
        them = Peer(*their_hello.me)
        lines = [
            f"  {meaning}: {getattr(self._credentials, key)!r} here, {getattr(their_hello, key)!r} at {them}"
            for key, meaning in COMPARED.items()
            if getattr(self._credentials, key) != getattr(their_hello, key)
        ]
        if not lines:
            return None
        return MismatchError(
            f"{self._me} and {them} do not belong to one run, so what they computed would not add up:\n"
            + "\n".join(lines)
        )

    # -- signed with the token ----------------------------------------------------------------------

    @property
    def _my_side(self) -> bytes:
        return LISTENER if self._dialed_peer is None else DIALER

    @property
    def _their_side(self) -> bytes:
        return DIALER if self._dialed_peer is None else LISTENER

    def _proof(self, side: bytes) -> Message:
        return encode_record(Kind.PROOF, ProofRecord(mac=self._mac(b"proof", side)))

    def _epoch(self, side: bytes) -> int:
        return int.from_bytes(self._mac(b"epoch", side)[:8], "little")

    def _frame_mac(self, side: bytes, their_hello: HelloRecord) -> FrameMac:
        """Of the frames that `side` sends. Payloads are hashed by POLYVAL where both ends have it.

        HMAC is the expansion step of HKDF (Krawczyk 2010, CRYPTO).
        """
        key = self._mac(b"frame key", side)
        if not (polyval.available() and their_hello.polyval):
            return FrameMac(key)
        return FrameMac(key, PolyvalKey(self._mac(b"payload key", side)[: polyval.KEY_BYTES]).begin)

    def _mac(self, purpose: bytes, side: bytes) -> bytes:
        hellos = (
            (self._received_hello, self._sent_hello)
            if self._dialed_peer is None
            else (self._sent_hello, self._received_hello)
        )
        parts = (b"gossamer", purpose, side, *hellos)
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._credentials.token, text, hashlib.sha256)
