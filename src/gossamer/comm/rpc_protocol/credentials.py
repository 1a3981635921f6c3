"""Credentials of peers: a handshake with credentials as claims, then a comparison of run, recipe and layout.

Both ends compare the settings after the proofs, so the errors at both ends name both values. Later frames are numbered
and carry tags, with keys derived from the handshake, one per direction (frame_mac). An attacker on the network can cut
a connection, but cannot modify, repeat, reorder or omit its frames. Only `tls` prevents reading them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gossamer.base.kernels import polyval
from gossamer.base.kernels.polyval import PolyvalKey
from gossamer.base.peer_ops import Peer
from gossamer.comm.handshake import DIALER, LISTENER, Dialer, Handshake, Listener, WrongKeyError
from gossamer.comm.rpc_protocol.frame_mac import FrameMac
from gossamer.comm.rpc_protocol.messages import HelloRecord, decode_hello, encode_hello
from gossamer.errors import ConnectError, GossamerError, MismatchError, PeerLost
from gossamer.version import __version__

PURPOSE = b"peers"
SHOWN_CHARACTERS = 100  # of a text from an unauthenticated peer


class OtherTokenError(ConnectError):
    """The peer has another token. The message has the run to which it claims to belong."""


COMPARED = {
    "gossamer": "Gossamer's version (install the same one everywhere)",
    "run": "the run (give every process of a run the same name)",
    "recipe": "the recipe (pass the same one everywhere)",
    "layout": "a hash of the parameters' names, shapes and dtypes (build the same model everywhere)",
    "largest_frame_bytes": "the maximum size of a frame (pass the same largest_frame_bytes everywhere)",
}


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Identity of a process, and settings that must be equal everywhere (else MismatchError, with both values).

    Attributes:
        me: this process: THE_SERVER or node_peer(3).
        token: 32 secret bytes that all processes of a run have.
        run: name of the run, equal everywhere.
        recipe: text of the run's recipe, equal everywhere.
        layout: hash of the names, shapes and dtypes of the parameters, equal everywhere.
        largest_frame_bytes: limit of a frame, equal everywhere; a larger one is rejected before memory is allocated.
        accepted_frame_bytes: limit for received frames, not compared; None: largest_frame_bytes.
        token_of: returns the token of a dialer that has its own; None: `token`.
        gossamer: version of this process.
        instance: 16 random bytes of this process.

    Example:
        token = read_token("token")
        credentials = Credentials(me=THE_SERVER, token=token, run="digits", largest_frame_bytes=2**26)
    """

    me: Peer
    token: bytes = field(repr=False)
    run: str
    recipe: str = ""
    layout: str = ""
    largest_frame_bytes: int
    accepted_frame_bytes: int | None = None
    token_of: Callable[[Peer], bytes | None] = field(default=lambda peer: None, repr=False)
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
            largest_frame_bytes=self.largest_frame_bytes,
            polyval=polyval.available(),
        )


class AuthenticatedPeer(NamedTuple):
    """The peer at the other end, after it has proven the token."""

    peer: Peer
    instance: bytes  # of its process
    limit_bytes: int  # of a received frame
    sending_epoch: int
    receiving_epoch: int
    sending_mac: FrameMac
    receiving_mac: FrameMac


class PeerHandshake:
    """One end of the handshake between peers. Send `output()` at the start and after each `receive`.

    dialed_peer: None in the listener.
    """

    def __init__(self, credentials: Credentials, dialed_peer: Peer | None) -> None:
        self._credentials, self._me, self._dialed_peer = credentials, credentials.me, dialed_peer
        if dialed_peer is None:
            self._handshake: Dialer | Listener = Listener(PURPOSE)
        else:
            self._handshake = Dialer(PURPOSE, credentials.token, encode_hello(credentials.hello(dialed_peer)))
        self.authenticated: AuthenticatedPeer | None = None
        self.refusal: GossamerError | None = None  # why peers with the same token do not belong to one run

    @property
    def wants_bytes(self) -> bool:
        return self._handshake.wanted_bytes > 0

    def output(self) -> bytes:
        return self._handshake.output()

    def receive(self, data: memoryview) -> int:
        """As Handshake.receive. Raises PeerLost for another peer than the dialed one, OtherTokenError for another
        token."""
        handshake = self._handshake
        try:
            used = handshake.receive(data)
            if isinstance(handshake, Listener):
                if handshake.claims is not None:
                    self._receive_dialer(handshake, handshake.claims)
            elif handshake.refused is not None:
                raise WrongKeyError(handshake.refused)
            elif handshake.accepted is not None:
                self._receive_listener(handshake, handshake.accepted)
        except WrongKeyError as wrong:
            raise self._wrong_token(decode_hello(wrong.claims)) from None
        return used

    def _receive_dialer(self, handshake: Listener, claims: bytes) -> None:
        hello = decode_hello(claims)
        them = self._expect_dialed(hello)
        encoded = encode_hello(self._credentials.hello(them))
        try:
            handshake.accept(self._credentials.token_of(them) or self._credentials.token, encoded)
        except WrongKeyError:
            handshake.refuse(encoded)  # so that the errors at both ends name both runs
            raise
        self._authenticate(handshake, hello, them, LISTENER, DIALER)

    def _receive_listener(self, handshake: Dialer, claims: bytes) -> None:
        hello = decode_hello(claims)
        self._authenticate(handshake, hello, self._expect_dialed(hello), DIALER, LISTENER)

    def _expect_dialed(self, hello: HelloRecord) -> Peer:
        """Return the sender of the claims. Raises PeerLost if either end is not the peer that the other expects."""
        them = Peer(*hello.me)
        if Peer(*hello.you) != self._me or them != (self._dialed_peer or them) or them == self._me:
            how = "was dialed" if self._dialed_peer is None else f"dialed {self._dialed_peer} and was answered"
            raise PeerLost(f"{self._me} {how} by {them}, which expected {Peer(*hello.you)}: an address is out of date.")
        return them

    def _wrong_token(self, hello: HelloRecord) -> OtherTokenError:
        return OtherTokenError(
            f"{Peer(*hello.me)} has another token than {self._me}, so neither can trust the other. It "
            f"claims to belong to run {hello.run[:SHOWN_CHARACTERS]!r}; this is run "
            f"{self._credentials.run!r}. Give all processes of a run the same token, and each run its own ports."
        )

    def _authenticate(
        self, handshake: Handshake, hello: HelloRecord, them: Peer, encoded: bytes, remote: bytes
    ) -> None:
        """encoded, remote: the sides (DIALER, LISTENER) of this end and of the peer."""
        credentials, accepted = self._credentials, self._credentials.accepted_frame_bytes
        self.refusal = self._difference(hello, them)
        self.authenticated = AuthenticatedPeer(
            peer=them,
            instance=hello.instance,
            limit_bytes=credentials.largest_frame_bytes if accepted is None else accepted,
            sending_epoch=int.from_bytes(handshake.derive_key(b"epoch", encoded)[:8], "little"),
            receiving_epoch=int.from_bytes(handshake.derive_key(b"epoch", remote)[:8], "little"),
            sending_mac=_frame_mac(handshake, encoded, hello),
            receiving_mac=_frame_mac(handshake, remote, hello),
        )

    def _difference(self, hello: HelloRecord, them: Peer) -> MismatchError | None:
        lines = [
            f"  {meaning}: {getattr(self._credentials, key)!r} here, {getattr(hello, key)!r} at {them}"
            for key, meaning in COMPARED.items()
            if getattr(self._credentials, key) != getattr(hello, key)
        ]
        if not lines:
            return None
        return MismatchError(
            f"{self._me} and {them} do not belong to one run, so their results cannot be combined:\n" + "\n".join(lines)
        )


def _frame_mac(handshake: Handshake, side: bytes, hello: HelloRecord) -> FrameMac:
    """MAC of the frames that `side` sends. Payloads are hashed with POLYVAL if both ends have it."""
    key = handshake.derive_key(b"frame key", side)
    if not (polyval.available() and hello.polyval):
        return FrameMac(key)
    return FrameMac(key, PolyvalKey(handshake.derive_key(b"payload key", side)[: polyval.KEY_BYTES]).begin)
