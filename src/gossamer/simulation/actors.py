"""Peers in a conversation, the words and answers between them, and what their scripts wait for."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Answer, Ask, Elapsed, Peer, PeerEvent, PeerOp, PeerScript, Pull, Push
from gossamer.errors import PeerLost
from gossamer.simulation.faulty_network import Link
from gossamer.simulation.trace import Ended

UNSEALED = 0


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


def seal(payload: Payload) -> int:
    """A checksum of what the tensors hold; tensors without data have none."""
    checksum = UNSEALED
    for tensor in payload:
        if tensor.device.type != "meta":
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(flat.numpy().data, checksum)
    return checksum


@dataclass(slots=True, eq=False)
class MessagePath:
    """From one peer to another. cuts: how many faults close it."""

    link: Link
    cuts: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True, eq=False)
class Actor:
    """A peer: its script, what it has not heard yet, and who else it believes to be there.

    life: the number of this start; deaths: when the earlier lives were killed; restarts: how many are still to come.
    present: who joined, in which of its lives; silent: since when the others cannot be heard.
    """

    peer: Peer
    start: Callable[[], PeerScript]
    ways: dict[Peer, MessagePath]
    waits: Wait
    script: PeerScript | None = None
    ended: Ended | None = None
    inbox: deque[Callable[..., PeerEvent]] = field(default_factory=deque)
    life: int = 0
    deaths: list[float] = field(default_factory=list)
    restarts: int = 0
    paused_until: float | None = None
    present: dict[Peer, int] = field(default_factory=dict)
    silent: dict[Peer, float] = field(default_factory=dict)

    def die(self, moment: float) -> None:
        self.script, self.waits, self.paused_until = None, READY, None
        self.ended = Ended(moment=moment, killed=True)
        self.life += 1
        self.deaths.append(moment)
        self.inbox.clear()


@dataclass(slots=True, eq=False)
class PendingAsk:
    """A Push or Pull of a peer in one of its lives. over: nobody waits for it any more; due: it will be sent again."""

    op: Ask
    asker: Actor
    life: int
    receiver: Actor
    nbytes: int
    sent: float
    seal: int
    answer: Answer | None = None
    over: bool = False
    due: bool = False

    @property
    def connected(self) -> bool:
        """Whether it could be heard and answered. What a stopped peer asked is not sent again."""
        if self.receiver.script is None or self.asker.paused_until is not None:
            return False
        return not self.asker.ways[self.receiver.peer].cuts and not self.receiver.ways[self.asker.peer].cuts

    def __str__(self) -> str:
        return f"the {text_of(self.op)} of {self.asker.peer} to {self.receiver.peer}"


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """A word on its way, or its answer, between two lives. left: when its last byte has left."""

    asked: PendingAsk
    answer: Answer | None
    nbytes: int
    sender_life: int
    receiver_life: int
    seal: int
    left: float = 0.0

    def check(self) -> None:
        """Raise AssertionError where somebody wrote to a payload under way."""
        answered = () if self.answer is None else self.answer.payload
        if seal(payload_of(self.asked.op)) != self.asked.seal or (answered and seal(answered) != self.seal):
            raise AssertionError(
                f"the payload of {self} was written to while it was under way, so what arrives is not what was said. "
                "It belongs to the transport until the answer is there: write to a clone."
            )

    def __str__(self) -> str:
        return str(self.asked) if self.answer is None else f"the answer to {self.asked}"


Turn = tuple[Callable[[Any], PeerOp], Any]


class Wait(Protocol):
    """What a script waits for. asked: its open words; turn: how it goes on, once it can."""

    @property
    def asked(self) -> tuple[PendingAsk, ...]: ...
    def turn(self, actor: Actor, script: PeerScript, now: float) -> Turn | None: ...


class Ready:
    """For nothing: what it said was answered at once, by None."""

    asked: tuple[PendingAsk, ...] = ()

    def turn(self, actor: Actor, script: PeerScript, now: float) -> Turn | None:
        return script.send, None

    def __str__(self) -> str:
        return "for nothing"


READY = Ready()


class Listening:
    """For something to happen, or for the moment `until`."""

    __slots__ = ("until",)
    asked: tuple[PendingAsk, ...] = ()

    def __init__(self, until: float | None) -> None:
        self.until = until

    def turn(self, actor: Actor, script: PeerScript, now: float) -> Turn | None:
        if actor.inbox:
            return script.send, actor.inbox.popleft()(moment=now)
        if self.until is not None and self.until <= now:
            return script.send, Elapsed(moment=now)
        return None

    def __str__(self) -> str:
        return "to hear something" if self.until is None else f"for the moment {self.until}"


@dataclass(slots=True, eq=False)
class Asking:
    """For the answers to several words, or to one alone. until: the moment at which it gives up."""

    asked: tuple[PendingAsk, ...]
    alone: bool
    until: float

    def turn(self, actor: Actor, script: PeerScript, now: float) -> Turn | None:
        answers = [asked.answer for asked in self.asked]
        if None not in answers:
            return script.send, answers[0] if self.alone else answers
        if self.until <= now:
            self._give_up()
            return script.throw, PeerLost(f"nobody answered {self._missing()} until {self.until}")
        return None

    def _give_up(self) -> None:
        for asked in self.asked:
            asked.over = True

    def _missing(self) -> str:
        return ", ".join(str(asked) for asked in self.asked if asked.answer is None)

    def __str__(self) -> str:
        return f"for the answer to {self._missing()}"
