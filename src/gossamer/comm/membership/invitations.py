"""Invitations: one link contains all that another machine needs to join a run, and the coordinator decides if it may.

    gossamer:AUYBAAAAA...    base64url of: version, flags, number, run, secret, addresses, checksum

The secret is not the run's token. It authenticates a connection (as a GUEST) that can only ask for the token, which the
coordinator sends while the invitation is valid. So lifetime, uses and revocation are decided by one clock and one book.
The journal of the coordinator has no secrets: the secret of an invitation is derived from the run's token.

    guest -> coordinator    Pull LOOK      answered by the addresses of the members, for `gossamer doctor`
                            Push REDEEM    answered by the run's token, encrypted, and the settings of the run
    member -> coordinator   Push INVITE    answered by a new invitation without its secret
                            Push REVOKE
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.base.host_port import Address, read_host_port
from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import Answer, Ask, Peer, Pull, Pulled, Push, Receipt
from gossamer.base.units import seconds_text
from gossamer.comm import libcrypto
from gossamer.comm.handshake import keyed_hash
from gossamer.comm.membership.journal import Issued, ViewJournal
from gossamer.errors import ConnectError, MalformedError, require

GUEST = "guest"  # kind of a peer that has an invitation only
REDEEM, INVITE, REVOKE = "redeem", "invite", "revoke"  # keys of pushes
LOOK = "look"  # key of a pull
PREFIX = "gossamer:"
VERSION, ENCRYPTED = 1, 1  # of the format; flag of a run with --tls
SECRET_BYTES, RUN_BYTES, CHECKSUM_BYTES, NONCE_BYTES = 32, 8, 4, 16
MOST_LINK_CHARACTERS, MOST_NUMBER = 4096, 2**31
LONGEST_SECONDS = 1e9
ONLY_MESSAGE = bytes(libcrypto.NONCE_BYTES)  # nonce of a key that encrypts one message
NEW_LINK = "Ask for a new link, which `gossamer invite RUN` prints on the first launcher's machine"
COPIED = "Copy the whole link again, or copy its file and write: gossamer join @FILE train.py"

_FIXED = struct.Struct(f"!BBI{RUN_BYTES}s{SECRET_BYTES}s")


@dataclass(frozen=True, kw_only=True)
class JoinLink:
    """The content of a link.

    Args:
        number: of the invitation, by which it can be revoked.
        run: the first 16 hexadecimal digits of the identity of the run.
        secret: 32 bytes, known to the coordinator and to the holders of the link.
        addresses: of the coordinator, the preferred one first.
        encrypted: whether joining needs --tls.
    """

    number: int
    run: str
    secret: bytes = field(repr=False)
    addresses: tuple[Address, ...]
    encrypted: bool = False

    def link(self) -> str:
        """The invitation as one word, without characters that a shell interprets."""
        places = ",".join(f"{host}:{port}" for host, port in self.addresses)
        flags = ENCRYPTED if self.encrypted else 0
        body = _FIXED.pack(VERSION, flags, self.number, bytes.fromhex(self.run), self.secret) + places.encode()
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def read_invitation(text: str) -> JoinLink:
    """Read a link. White space is ignored, because a copied line may be broken. Raises ConnectError."""
    link = "".join(text.split())
    if not link.startswith(PREFIX):
        raise ConnectError(
            f"{link[:20]!r} is not an invitation, which begins with {PREFIX!r}. {COPIED}"
            if link
            else f"the invitation is empty. {COPIED}"
        )
    try:
        encoded = link.removeprefix(PREFIX)
        require(len(encoded) <= MOST_LINK_CHARACTERS, "it is too long")
        whole = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        body, checksum = whole[:-CHECKSUM_BYTES], whole[-CHECKSUM_BYTES:]
        require(checksum == _checksum(body), "its checksum is wrong")
        version = body[0]
        if version == VERSION:
            _, flags, number, run, secret = _FIXED.unpack_from(body)
            addresses = tuple(read_host_port(each) for each in body[_FIXED.size :].decode().split(","))
            return JoinLink(
                number=number, run=run.hex(), secret=secret, addresses=addresses, encrypted=bool(flags & ENCRYPTED)
            )
    except (ValueError, IndexError, struct.error):
        raise ConnectError(f"the link is mistyped or cut off. {COPIED}") from None
    raise ConnectError(
        f"the link has format {version}, but this version of Gossamer reads format {VERSION}. Install the version of "
        "Gossamer that the first launcher has."
    )


def invitation_secret(token: bytes, run: str, number: int) -> bytes:
    """Derive the secret of an invitation. run: the whole identity of the run."""
    return keyed_hash(token, b"invitation", run.encode(), number.to_bytes(8, "big"))


def _answer_key(secret: bytes, nonces: bytes) -> bytes:
    """The key of one answer to REDEEM. nonces: of both ends, so no two answers have one key."""
    return keyed_hash(secret, b"invited token", nonces)


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What the run gives to a machine that joins.

    Args:
        token: the content of the token file.
        addresses: of the coordinator, for new links.
        settings: options of the run that joining launchers share, such as {"recipe": "Int8()"}.
        encrypted: whether the run has --tls.
        relays: whether the coordinator relays connections between workers.
    """

    token: bytes = field(repr=False)
    addresses: tuple[Address, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    encrypted: bool = False
    relays: bool = False


class InvitationBook:
    """The coordinator's invitations. It has no socket.

    Args:
        token: the key of members, a hash of the token file.
        run: identity of the run.
        journal: storage, which a restarted coordinator reads.
        welcome: the content of an answer to a guest.
        clock: seconds since the epoch: a lifetime includes the time in which no coordinator runs.
        draw: source of random bytes.
    """

    def __init__(
        self,
        token: bytes,
        run: str,
        journal: ViewJournal,
        welcome: Welcome,
        clock: Callable[[], float] = time.time,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._token, self._run, self._journal, self._welcome = token, run, journal, welcome
        self._clock, self._draw = clock, draw

    def create(self, lifetime_seconds: float | None, uses: int | None) -> JoinLink:
        """Make an invitation. None: without a limit. Raises ConnectError for limits that admit no machine."""
        if lifetime_seconds is not None and not 0 < lifetime_seconds <= LONGEST_SECONDS:
            raise ConnectError(f"a link is valid for 0 to {LONGEST_SECONDS:g} s, got {lifetime_seconds} s. Write 24h")
        if uses is not None and uses < 1:
            raise ConnectError(f"a link must admit at least one machine, got {uses}. Write --uses 1")
        number = max(self._issued, default=0) + 1
        if number >= MOST_NUMBER:
            raise ConnectError("this run has issued too many invitations; use an earlier link")
        expires = None if lifetime_seconds is None else self._clock() + lifetime_seconds
        self._keep(Issued(number=number, expires=expires, uses=uses))
        return self._invitation(number)

    def revoke(self, number: int) -> None:
        """Make a link invalid. Machines that have joined by it keep the token. Raises ConnectError."""
        if number not in self._issued:
            known = ", ".join(map(str, self._issued)) or "none"
            raise ConnectError(f"this run has no invitation {number}; its invitations: {known}")
        self._keep(replace(self._issued[number], revoked=True))

    def secret(self, guest: Peer) -> bytes | None:
        """The key of a guest's connection; None if this run has no such invitation."""
        number = invitation_of(guest)
        return invitation_secret(self._token, self._run, number) if number in self._issued else None

    def refusal(self, number: int, machine: int) -> str:
        """Why a machine may not join by an invitation; empty if it may."""
        issued, now = self._issued.get(number), self._clock()
        if issued is None:
            return f"this run has no invitation {number}. {NEW_LINK}"
        if issued.revoked:
            return f"this link (invitation {number}) was revoked. {NEW_LINK}"
        if issued.expires is not None and now >= issued.expires:
            return f"this link expired {seconds_text(now - issued.expires)} ago. {NEW_LINK}"
        if issued.uses is not None and machine not in issued.machines and len(issued.machines) >= issued.uses:
            return f"this link was used {len(issued.machines)} of {issued.uses} times. {NEW_LINK}"
        return ""

    def answer_guest(
        self,
        guest: Peer,
        op: Ask,
        members: tuple[tuple[Address, ...], ...] = (),
        status: str = "",
        seen_as: Address | None = None,
        other_relays: tuple[Address, ...] = (),
    ) -> Answer:
        """Answer a request of a guest.

        Args:
            guest: its name.
            op: the request.
            members: addresses of each current worker.
            status: of the run, as text.
            seen_as: the address from which the guest is connected.
            other_relays: addresses of relays other than the coordinator.
        """
        number = invitation_of(guest)
        match op:
            case Pull(key=key) if key == LOOK:
                refused = self.refusal(number, -1)
                shown: dict[str, Any] = {"members": members, "status": status, "seen_as": seen_as}
                shown |= {"relays": self._welcome.relays, "other_relays": other_relays}
                return Pulled(version=0, about=json.dumps({"refused": refused} if refused else shown))
            case Push(key=key, stamp=stamp, about=about) if key == REDEEM:
                if refused := self.refusal(number, stamp.worker):
                    return Receipt(version=-1, about=json.dumps({"refused": refused}))
                try:
                    return Receipt(version=0, about=self._redeem(number, stamp.worker, about))
                except ConnectError as error:  # no libcrypto
                    return Receipt(version=-1, about=json.dumps({"refused": f"the coordinator: {error}"}))
        return Receipt(version=-1, about=json.dumps({"refused": f"a guest cannot request {op.key[:40]!r}"}))

    def answer_member(self, op: Push) -> Receipt:
        """Answer INVITE and REVOKE."""
        try:
            if op.key == REVOKE:
                self.revoke(op.stamp.step)
                return Receipt(version=0, about=json.dumps({"run": self._run}))
            lifetime, uses = _read_limits(op.about)
            made = self.create(lifetime, uses)
        except (ConnectError, MalformedError) as error:
            return Receipt(version=-1, about=json.dumps({"refused": str(error)}))
        facts = {"number": made.number, "run": self._run, "addresses": made.addresses, "encrypted": made.encrypted}
        return Receipt(version=0, about=json.dumps(facts))

    @property
    def _issued(self) -> Mapping[int, Issued]:
        return self._journal.load().invitations

    def _keep(self, issued: Issued) -> None:
        self._journal.append({"invitation": issued.record()})

    def _invitation(self, number: int) -> JoinLink:
        return JoinLink(
            number=number,
            run=self._run[: 2 * RUN_BYTES],
            secret=invitation_secret(self._token, self._run, number),
            addresses=self._welcome.addresses,
            encrypted=self._welcome.encrypted,
        )

    def _redeem(self, number: int, machine: int, about: str) -> str:
        nonce = about.encode()[: 2 * NONCE_BYTES]  # of the guest
        own = self._draw(NONCE_BYTES)
        key = _answer_key(invitation_secret(self._token, self._run, number), nonce + own)
        sealed = libcrypto.seal(key, ONLY_MESSAGE, self._welcome.token)
        issued = self._issued[number]
        if issued.uses is not None and machine not in issued.machines:
            self._keep(replace(issued, machines=issued.machines | {machine}))
        return json.dumps({"nonce": own.hex(), "sealed": sealed.hex(), "settings": dict(self._welcome.settings)})


@dataclass(frozen=True, kw_only=True)
class Redeemed:
    """The answer to a valid invitation. token: content of the run's token file."""

    token: bytes = field(repr=False)
    settings: Mapping[str, str]


def read_redeemed(invitation: JoinLink, nonce: str, about: str) -> Redeemed:
    """Read the answer to REDEEM. nonce: of the request, 32 characters.

    Raises ConnectError if it is a refusal or the coordinator's version differs, and MalformedError.
    """
    read = read_answer(about)
    if "sealed" not in read and "token" in read:
        raise ConnectError(
            "the coordinator of this run has an older version of Gossamer, which encrypts its token in another way. "
            "Install the version of the first launcher here, or a newer one there."
        )
    try:
        settings = {str(name): str(value) for name, value in read["settings"].items()}
        nonces = nonce.encode() + bytes.fromhex(read["nonce"])
        key = _answer_key(invitation.secret, nonces)
        return Redeemed(token=libcrypto.unseal(key, ONLY_MESSAGE, bytes.fromhex(read["sealed"])), settings=settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"invalid answer to an invitation ({type(error).__name__})") from None


def read_issued(token: bytes, about: str) -> JoinLink:
    """Read the answer to INVITE. token: the key of members. Raises ConnectError and MalformedError."""
    read = read_answer(about)
    try:
        number, run = int(read["number"]), str(read["run"])
        return JoinLink(
            number=number,
            run=run[: 2 * RUN_BYTES],
            secret=invitation_secret(token, run, number),
            addresses=tuple((str(host), int(port)) for host, port in read["addresses"]),
            encrypted=bool(read["encrypted"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"invalid answer about a new invitation ({type(error).__name__})") from None


def read_answer(about: str) -> Mapping[str, Any]:
    """Read an answer of the book. Raises ConnectError if it is a refusal, and MalformedError."""
    try:
        read = read_json(about)
        require(isinstance(read, dict), "not an object")
    except ValueError:
        raise MalformedError("invalid answer about an invitation") from None
    if "refused" in read:
        raise ConnectError(str(read["refused"]))
    return dict(read)


def guest_of(number: int) -> Peer:
    """A new peer for a connection by this invitation; each has another number."""
    return Peer(GUEST, (number << 32) | secrets.randbits(32))


def invitation_of(guest: Peer) -> int:
    """The number of the invitation by which a guest connects."""
    return guest.number >> 32


def _read_limits(about: str) -> tuple[float | None, int | None]:
    read = read_answer(about)
    lifetime, uses = read.get("lifetime_seconds"), read.get("uses")
    if not (lifetime is None or type(lifetime) in (int, float)) or not (uses is None or type(uses) is int):
        raise ConnectError("lifetime and uses of an invitation must be numbers")
    return lifetime, uses


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"gossamer invitation" + body).digest()[:CHECKSUM_BYTES]
