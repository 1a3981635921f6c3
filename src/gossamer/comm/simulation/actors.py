"""Actors: peers in a simulation, their pending requests, and the conditions for which their scripts wait."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gossamer.base.layout import bytes_of
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Answer, Ask, Elapsed, Peer, PeerEvent, PeerOp, PeerScript, Pull, Push
from gossamer.comm.simulation.faulty_network import Link
from gossamer.comm.simulation.trace import Ended
from gossamer.errors import PeerLost

NO_CHECKSUM = 0


def receiver_of(op: Ask) -> Peer:
    return op.to if isinstance(op, Push) else op.of


def payload_of(op: Ask) -> Payload:
    return op.payload if isinstance(op, Push) else ()


def text_of(op: Ask) -> str:
    match op:
        case Push():
            return f"push of {op.key!r} (step {op.stamp.step})"
        case Pull():
            return f"pull of {op.key!r} (known {op.known}, at_least {op.at_least})"


def payload_checksum(payload: Payload) -> int:
    """CRC-32 of the tensors' data; meta tensors are skipped."""
    checksum = NO_CHECKSUM
    for tensor in payload:
        if tensor.device.type != "meta":
            flat = bytes_of(tensor.detach().cpu().contiguous())
            checksum = zlib.crc32(flat.numpy().data, checksum)
    return checksum


@dataclass(slots=True, eq=False)
class MessagePath:
    """The path from one peer to another."""

    link: Link
    cuts: int = 0  # number of active faults that close it
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True, eq=False)
class Actor:
    """A peer: its script, its inbox, and the peers that it considers present."""

    peer: Peer
    start: Callable[[], PeerScript]
    paths: dict[Peer, MessagePath]
    wait: Wait
    script: PeerScript | None = None
    ended: Ended | None = None
    inbox: deque[Callable[..., PeerEvent]] = field(default_factory=deque)
    incarnation: int = 0  # number of restarts so far
    deaths: list[float] = field(default_factory=list)  # when earlier incarnations were killed
    restarts: int = 0  # number of scheduled restarts
    paused_until: float | None = None
    present: dict[Peer, int] = field(default_factory=dict)  # peers that joined, with their incarnation
    silent: dict[Peer, float] = field(default_factory=dict)  # unreachable peers, and since when

    def die(self, moment: float) -> None:
        self.script, self.wait, self.paused_until = None, READY, None
        self.ended = Ended(moment=moment, killed=True)
        self.incarnation += 1
        self.deaths.append(moment)
        self.inbox.clear()


@dataclass(slots=True, eq=False)
class PendingAsk:
    """A Push or Pull of one incarnation of a peer."""

    op: Ask
    asker: Actor
    incarnation: int
    receiver: Actor
    nbytes: int
    sent: float
    checksum: int
    answer: Answer | None = None
    settled: bool = False  # answered or cancelled
    resend_due: bool = False  # a resend is scheduled

    @property
    def connected(self) -> bool:
        """Whether the peers can exchange messages. Requests of a paused peer are not resent."""
        if self.receiver.script is None or self.asker.paused_until is not None:
            return False
        return not self.asker.paths[self.receiver.peer].cuts and not self.receiver.paths[self.asker.peer].cuts

    def __str__(self) -> str:
        return f"the {text_of(self.op)} of {self.asker.peer} to {self.receiver.peer}"


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """A request or an answer in transit between two incarnations."""

    pending: PendingAsk
    answer: Answer | None
    nbytes: int
    sender_incarnation: int
    receiver_incarnation: int
    checksum: int
    departed_at: float = 0.0  # when the sender finished sending it

    def check(self) -> None:
        """Raise AssertionError if a payload was modified in transit."""
        answered = () if self.answer is None else self.answer.payload
        if payload_checksum(payload_of(self.pending.op)) != self.pending.checksum or (
            answered and payload_checksum(answered) != self.checksum
        ):
            raise AssertionError(
                f"the payload of {self} was modified in transit. "
                "It belongs to the transport until the answer arrives: modify a clone."
            )

    def __str__(self) -> str:
        return str(self.pending) if self.answer is None else f"the answer to {self.pending}"


Resumption = tuple[Callable[[Any], PeerOp], Any]


class Wait(Protocol):
    """The condition for which a script waits: its pending requests, and how it resumes."""

    @property
    def pending(self) -> tuple[PendingAsk, ...]: ...
    def resumption(self, actor: Actor, script: PeerScript, now: float) -> Resumption | None: ...


class Ready:
    """No condition: the op is complete, with result None."""

    pending: tuple[PendingAsk, ...] = ()

    def resumption(self, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
        return script.send, None

    def __str__(self) -> str:
        return "for nothing"


READY = Ready()


class Listening:
    """An event, or the time `until`."""

    __slots__ = ("until",)
    pending: tuple[PendingAsk, ...] = ()

    def __init__(self, until: float | None) -> None:
        self.until = until

    def resumption(self, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
        if actor.inbox:
            return script.send, actor.inbox.popleft()(moment=now)
        if self.until is not None and self.until <= now:
            return script.send, Elapsed(moment=now)
        return None

    def __str__(self) -> str:
        return "for an event" if self.until is None else f"for the time {self.until}"


@dataclass(slots=True, eq=False)
class Asking:
    """The answers to requests."""

    pending: tuple[PendingAsk, ...]
    single: bool  # a single request, with an answer that is not in a list
    until: float  # timeout

    def resumption(self, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
        answers = [pending.answer for pending in self.pending]
        if None not in answers:
            return script.send, answers[0] if self.single else answers
        if self.until <= now:
            self._give_up()
            return script.throw, PeerLost(f"no answer to {self._missing()} until {self.until}")
        return None

    def _give_up(self) -> None:
        for pending in self.pending:
            pending.settled = True

    def _missing(self) -> str:
        return ", ".join(str(pending) for pending in self.pending if pending.answer is None)

    def __str__(self) -> str:
        return f"for the answer to {self._missing()}"
