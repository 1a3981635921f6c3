"""Peer operations: push, pull, await and reply, for peers that are not in lock step.

A peer's script yields an operation and receives the answer, as an algorithm in lock step does. Its runner (sockets, or
a simulation in virtual time) delivers a message at least once and with identical bytes, so receivers must be
idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from gossamer.base.ops import Payload

WORKER, SERVER = "worker", "server"


class Peer(NamedTuple):
    """A worker that trains, or a server that holds parameters; each kind is numbered from 0."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Stamp(NamedTuple):
    """The identity of a contribution. The steps of a worker ascend; a contribution is applied at most once."""

    worker: int
    step: int
    known: int = 0  # the version of the parameters that it was computed from


@dataclass(frozen=True, kw_only=True)
class Push:
    """Send a payload to a peer; answered by a Receipt."""

    to: Peer
    key: str
    stamp: Stamp
    payload: Payload = ()
    about: str = ""  # further information for the peer, as JSON
    within_seconds: float | None = None  # timeout of the answer, after which PeerLost is raised; None: no timeout


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Request a peer's value of `key` newer than a version; answered by Pulled."""

    of: Peer
    key: str
    known: int = -1  # the version that this peer has
    at_least: int = 0  # answered once this clock is reached
    within_seconds: float | None = None  # as in Push, including the wait for the clock


Ask = Push | Pull


@dataclass(frozen=True)
class AtOnce:
    """Several concurrent operations; the answers are in the same order."""

    ops: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True)
class Await:
    """Wait until a message arrives, or a peer joins or leaves."""

    until: float | None = None  # latest time of the clock, in seconds; None: no limit


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Confirms that a Push arrived, now or before."""

    version: int  # of the value it was applied to, afterwards; -1 if it was too late to count
    payload: Payload = ()  # the peer's payload in exchange
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The answer to a Pull."""

    version: int  # of the payload
    payload: Payload = ()
    about: str = ""  # how to read the payload, as JSON


Answer = Receipt | Pulled


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer the message that arrived under `token`.

    Answered immediately by None; a peer that has left receives nothing.
    """

    token: int
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class PeerEvent:
    """Base of the answers of Await."""

    moment: float  # of the clock, in seconds; comparable to Await.until only


@dataclass(frozen=True, kw_only=True)
class Arrived(PeerEvent):
    """`sender` requests `op` and waits for the Reply to `token`. Tokens are unique, also of repeated messages.

    It comes after PeerJoined of the sender and before PeerLeft, so a server never adds a worker that has left.
    """

    token: int
    sender: Peer
    op: Ask


@dataclass(frozen=True, kw_only=True)
class PeerJoined(PeerEvent):
    """A peer can be reached, for the first time or again."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class PeerLeft(PeerEvent):
    """A peer was silent for so long that it counts as lost."""

    peer: Peer


@dataclass(frozen=True, kw_only=True)
class Elapsed(PeerEvent):
    """Nothing else happened until Await.until."""


STOPPED_SECONDS = 2.0  # by which an event is late if this process was stopped


def stopped_seconds(event: PeerEvent, since: float, until: float | None) -> float:
    """Seconds by which a script moves its deadlines because this process was stopped, perhaps with its peers; 0 if not.

    Args:
        event: the answer of an Await.
        since: moment of the event before.
        until: of the Await.
    """
    is_late = until is not None and event.moment > until + STOPPED_SECONDS
    return event.moment - since if is_late else 0.0


PeerOp = Push | Pull | AtOnce | Await | Reply
PeerScript = Generator[PeerOp, Any, Any]


def without_stops(script: PeerScript) -> PeerScript:
    """Run a script on a clock without the time in which its process was stopped, so that all its deadlines move.

    A stop is noticed if it outlasts an Await's `until`: script must wait for seconds at most.
    """
    stopped = since = 0.0
    proceed: Callable[[], PeerOp] = partial(next, script)
    while True:
        try:
            op = proceed()
        except StopIteration as end:
            return end.value
        del proceed  # with an event's tensors, which a script may release while it waits
        try:
            if isinstance(op, Await):
                until = None if op.until is None else op.until + stopped
                event = yield Await(until=until)
                stopped += stopped_seconds(event, since, until) if until != -inf else 0.0
                since = event.moment
                proceed = partial(script.send, replace(event, moment=since - stopped))
                del event
            else:
                proceed = partial(script.send, (yield op))
        except Exception as error:
            proceed = partial(script.throw, error)
