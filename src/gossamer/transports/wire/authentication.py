"""Two strangers show each other that they hold the same token, and find out whether they belong together.

    dialler  -> listener    hello: version, run, recipe, layout, who I am, whom I call, a fresh nonce
    listener -> dialler     hello, proof
    dialler  -> listener    proof                proof = HMAC-SHA256(token, direction, both hellos)

A proof covers both nonces, both names and everything else that was said, and names its direction: one that is replayed
or reflected proves nothing. What differs is compared after the proof, at both ends, so both can name both values.
Frames that follow carry an epoch drawn from the same secret, one for each direction, and count up: those of another
connection, or from the other direction, are refused. They are not authenticated one by one: whoever can change what
travels between two hosts can change tensors. On a network that is not trusted, give the endpoint `tls`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from gossamer.core.peer_ops import Peer
from gossamer.errors import ConnectError, GossamerError, MalformedError, MismatchError, PeerLost
from gossamer.transports.wire.frames import Kind, Message
from gossamer.transports.wire.messages import HelloRecord, ProofRecord, Record, message_of
from gossamer.version import __version__

DIALLER, LISTENER = b"dialler", b"listener"
SHOWN = 100  # letters of what a stranger says

COMPARED = {
    "gossamer": "Gossamer's version (install the same one everywhere)",
    "run": "the run (give every process of a run the same name)",
    "recipe": "the recipe (pass the same one everywhere)",
    "layout": "a hash of the parameters' names, shapes and dtypes (build the same model everywhere)",
    "largest_frame_bytes": "the size that no frame exceeds (pass the same largest_frame_bytes everywhere)",
}


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Who a process is, and what must be alike everywhere. token: secret; instance: drawn anew at each start."""

    me: Peer
    token: bytes = field(repr=False)
    run: str
    recipe: str
    layout: str
    largest_frame_bytes: int
    gossamer: str = __version__
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))

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
        )


class AuthenticatedPeer(NamedTuple):
    """Who is at the other end. limit_bytes: of a frame, either way; epochs: of the frames said and heard."""

    peer: Peer
    instance: bytes
    limit_bytes: int
    saying_epoch: int
    hearing_epoch: int


class Handshake:
    """One end of it. Say what `begin` and `hear` return; then look at `met`, or why `refused`.

    calls: whom the dialler wants; None for the listener. A refused dialler still shows its proof, so that the listener
    learns whom it refused.
    """

    def __init__(self, papers: Credentials, calls: Peer | None) -> None:
        self._papers, self._calls = papers, calls
        self._said = self._heard = b""
        self._theirs: HelloRecord | None = None
        self.met: AuthenticatedPeer | None = None
        self.refused: GossamerError | None = None

    def begin(self) -> list[Message]:
        return [] if self._calls is None else [self._hello(self._calls)]

    def hear(self, record: Record, control: bytes) -> list[Message]:
        match record:
            case HelloRecord() if self._theirs is None:
                return self._hear_hello(record, control)
            case ProofRecord() if self._theirs is not None and self.met is None:
                return self._hear_proof(record, self._theirs)
        raise MalformedError("Something else was said where a handshake stands. Is another program calling?")

    def _hello(self, you: Peer) -> Message:
        message = message_of(Kind.HELLO, self._papers.hello(you))
        self._said = message.control
        return message

    def _hear_hello(self, theirs: HelloRecord, control: bytes) -> list[Message]:
        self._theirs, self._heard = theirs, control
        them = Peer(*theirs.me)
        if Peer(*theirs.you) != self._papers.me or them != (self._calls or them) or them == self._papers.me:
            how = "was called" if self._calls is None else f"called {self._calls} and was answered"
            raise PeerLost(
                f"{self._papers.me} {how} by {them}, who wanted {Peer(*theirs.you)}: somebody's address has changed."
            )
        if self._calls is not None:
            return []
        return [self._hello(them), self._proof(LISTENER)]

    def _hear_proof(self, proof: ProofRecord, theirs: HelloRecord) -> list[Message]:
        if not hmac.compare_digest(proof.mac, self._mac(b"proof", self._their_side)):
            raise ConnectError(
                f"{Peer(*theirs.me)} holds another token than {self._papers.me}, so neither can trust the other. It "
                f"says that it belongs to run {theirs.run[:SHOWN]!r}, and this is run {self._papers.run!r}: give all "
                "processes of a run the same token, and each run its own ports."
            )
        self.refused = self._difference(theirs)
        self.met = AuthenticatedPeer(
            peer=Peer(*theirs.me),
            instance=theirs.instance,
            limit_bytes=self._papers.largest_frame_bytes,
            saying_epoch=self._epoch(self._my_side),
            hearing_epoch=self._epoch(self._their_side),
        )
        return [] if self._calls is None else [self._proof(DIALLER)]

    def _difference(self, theirs: HelloRecord) -> MismatchError | None:
        lines = [
            f"  {meaning}: {getattr(self._papers, key)!r} here, {getattr(theirs, key)!r} at {Peer(*theirs.me)}"
            for key, meaning in COMPARED.items()
            if getattr(self._papers, key) != getattr(theirs, key)
        ]
        if not lines:
            return None
        return MismatchError(
            f"{self._papers.me} and {Peer(*theirs.me)} do not belong to one run, so what they computed would not add "
            "up:\n" + "\n".join(lines)
        )

    # -- what the token signs -----------------------------------------------------------------------

    @property
    def _my_side(self) -> bytes:
        return LISTENER if self._calls is None else DIALLER

    @property
    def _their_side(self) -> bytes:
        return DIALLER if self._calls is None else LISTENER

    def _proof(self, side: bytes) -> Message:
        return message_of(Kind.PROOF, ProofRecord(mac=self._mac(b"proof", side)))

    def _epoch(self, side: bytes) -> int:
        return int.from_bytes(self._mac(b"epoch", side)[:8], "little")

    def _mac(self, purpose: bytes, side: bytes) -> bytes:
        hellos = (self._heard, self._said) if self._calls is None else (self._said, self._heard)
        parts = (b"gossamer", purpose, side, *hellos)
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._papers.token, text, hashlib.sha256)
