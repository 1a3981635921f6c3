"""The words of peers that do not move in step, and what they hear.

A peer's script yields a word and receives the answer, as an algorithm in lock step does. Whoever runs it (sockets, a
simulation in virtual time) delivers a word at least once and with identical bytes, so that who hears it twice must not
act on it twice.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gossamer.core.ops import Payload

WORKER, SERVER = "worker", "server"


class Peer(NamedTuple):
    """Who takes part: a worker that trains, or a server that holds parameters; numbered from 0 in each kind."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Stamp(NamedTuple):
    """Which contribution this is: of `worker`, its `step`-th, computed from parameters of version `known`.

    Steps of a worker ascend. What was taken once is never taken again.
    """

    worker: int
    step: int
    known: int = 0


@dataclass(frozen=True, kw_only=True)
class Push:
    """Hand `payload` to a peer; answered by a Receipt. about: what else it must know, as JSON.

    within_seconds: raise PeerLost in the script where nobody answered by then; None keeps trying.
    """

    to: Peer
    key: str
    stamp: Stamp
    payload: Payload = ()
    about: str = ""
    within_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Ask for what a peer has under `key` beyond version `known`; answered by Pulled, once clock `at_least` is reached.

    within_seconds: as in Push; waiting for a clock counts.
    """

    of: Peer
    key: str
    known: int = -1
    at_least: int = 0
    within_seconds: float | None = None


Ask = Push | Pull


@dataclass(frozen=True)
class AtOnce:
    """Say several words at once, none of which waits for another; the answers come in the same order."""

    ops: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True)
class Await:
    """Wait for what others say, come or go, until the clock shows `until` seconds; None waits for ever."""

    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A Push arrived, now or before. version: what it was applied to became; -1 where it was too late to count.

    payload: what a peer gives in exchange.
    """

    version: int
    payload: Payload = ()
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What was asked for. version: which it brings the asker to; about: how to read the payload, as JSON."""

    version: int
    payload: Payload = ()
    about: str = ""


Answer = Receipt | Pulled


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer the word that arrived under `token`. Answered at once, by None; an asker that left hears nothing."""

    token: int
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class PeerEvent:
    """What Await hears. moment: the clock's, in seconds, comparable to Await.until only."""

    moment: float


@dataclass(frozen=True, kw_only=True)
class Arrived(PeerEvent):
    """`sender` said `word`; it waits for the Reply to `token`. Tokens are unique, also where a word comes twice."""

    token: int
    sender: Peer
    op: Ask


@dataclass(frozen=True, kw_only=True)
class PeerJoined(PeerEvent):
    """A peer can be heard, for the first time or again."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class PeerLeft(PeerEvent):
    """A peer was not heard for so long that it counts as gone."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Elapsed(PeerEvent):
    """Nothing else happened until the time that was asked for."""


PeerOp = Push | Pull | AtOnce | Await | Reply
PeerScript = Generator[PeerOp, Any, Any]
