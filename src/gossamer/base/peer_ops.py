"""Peer operations: push, pull, await and reply, for peers that do not move in step.

A peer's script yields an operation and receives the answer, as an algorithm in lock step does. Its runner (sockets, a
simulation in virtual time) delivers a message at least once and with identical bytes, so a receiver must be idempotent.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gossamer.base.ops import Payload

WORKER, SERVER = "worker", "server"


class Peer(NamedTuple):
    """A worker that trains, or a server that holds parameters; numbered from 0 in each kind."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Stamp(NamedTuple):
    """A contribution's identity. Steps of a worker ascend; what was taken once is never taken again."""

    worker: int
    step: int
    known: int = 0  # the version of the parameters that it was computed from


@dataclass(frozen=True, kw_only=True)
class Push:
    """Hand a payload to a peer; answered by a Receipt."""

    to: Peer
    key: str
    stamp: Stamp
    payload: Payload = ()
    about: str = ""  # what else the peer must know, as JSON
    within_seconds: float | None = None  # raise PeerLost in the script without an answer by then; None keeps trying


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Ask for what a peer has under `key` beyond a version; answered by Pulled."""

    of: Peer
    key: str
    known: int = -1  # the version that this peer has
    at_least: int = 0  # answered once this clock is reached
    within_seconds: float | None = None  # as in Push; waiting for the clock counts


Ask = Push | Pull


@dataclass(frozen=True)
class AtOnce:
    """Several operations at once, none of which waits for another; the answers come in the same order."""

    ops: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True)
class Await:
    """Wait until a message comes, or a peer comes or goes."""

    until: float | None = None  # at most until the clock shows so many seconds; None waits for ever


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A Push arrived, now or before."""

    version: int  # of what it was applied to, afterwards; -1 where it was too late to count
    payload: Payload = ()  # what the peer gives in exchange
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The answer to a Pull."""

    version: int  # to which it brings the asker
    payload: Payload = ()
    about: str = ""  # how to read the payload, as JSON


Answer = Receipt | Pulled


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer the message that arrived under `token`. Answered at once, by None; an asker that left gets nothing."""

    token: int
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class PeerEvent:
    """What Await is answered by."""

    moment: float  # of the clock, in seconds; comparable to Await.until only


@dataclass(frozen=True, kw_only=True)
class Arrived(PeerEvent):
    """`sender` asks for `op` and waits for the Reply to `token`. Tokens are unique, also of repeated messages."""

    token: int
    sender: Peer
    op: Ask


@dataclass(frozen=True, kw_only=True)
class PeerJoined(PeerEvent):
    """A peer can be reached, for the first time or again."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class PeerLeft(PeerEvent):
    """A peer was silent for so long that it counts as gone."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Elapsed(PeerEvent):
    """Nothing else happened until Await.until."""


PeerOp = Push | Pull | AtOnce | Await | Reply
PeerScript = Generator[PeerOp, Any, Any]
