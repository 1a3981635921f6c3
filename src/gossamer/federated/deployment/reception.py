"""Reception: the script of a federation's server, between devices that come and go and the rounds.

It admits devices and translates identities to numbers. A device whose connection broke is not chosen, and keeps its
task and the parts that it has sent for as long as it is waited for: phones sleep. Who says farewell is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

import msgspec

from gossamer.base.peer_ops import (
    Answer,
    Arrived,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
)
from gossamer.errors import CheckpointError, ConnectError, MalformedError
from gossamer.events import notice
from gossamer.federated.deployment.enrollment import Enrollment
from gossamer.federated.deployment.invitations import (
    DEVICE,
    JOIN,
    LEAVE,
    UNKNOWN,
    Invitation,
    JoinRequest,
)
from gossamer.federated.messages import CLIENT, TASK, decode, encode
from gossamer.federated.server.rounds import Rounds

POLL_SECONDS = 0.25  # after which a stop is noticed
FULL = "Its disk has no room for another number. Free some space there, and start this device again."


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits for devices that are not there, in seconds."""

    absent_seconds: float = 300.0  # a device without a connection keeps its task for so long
    farewell_seconds: float = 30.0  # after the last round, for devices that have not heard of it


class Reception:
    """Who is there, and who is waited for. Devices are known by the identity that they drew."""

    def __init__(self, rounds: Rounds, enrollment: Enrollment, invitation: Invitation, patience: Patience) -> None:
        self._rounds, self._enrollment, self._invitation, self._patience = rounds, enrollment, invitation, patience
        self.present: set[int] = set()  # devices that have a connection
        self.joined: set[int] = set()  # of these, the ones that have a number
        self._absent: dict[int, float] = {}  # by number, until when it is waited for
        self._finished_at = inf
        self._said_full = False

    def serve(self, stopped: Callable[[], bool]) -> PeerScript:
        """Serve until the federation has ended and devices know it, or until it is stopped."""
        event: PeerEvent = yield Await(until=-inf)
        self._rounds.roster.known.update(self._enrollment.numbers)
        self._rounds.begin(event.moment)
        while not stopped():
            yield from self._react(event)
            if self._is_over(event.moment):
                return
            due = min(self._rounds.due, self._due(), event.moment + POLL_SECONDS)
            event = None  # type: ignore[assignment]  # what it brought is not kept while waiting
            event = yield Await(until=due)

    def _is_over(self, moment: float) -> bool:
        if not self._rounds.finished:
            return False
        self._finished_at = min(self._finished_at, moment)
        expected = self.joined or self._absent
        return not expected or moment >= self._finished_at + self._patience.farewell_seconds

    def _due(self) -> float:
        return min(self._absent.values(), default=inf)

    def _react(self, event: PeerEvent) -> Iterator[Reply]:
        match event:
            case PeerJoined(peer=peer):
                self.present.add(peer.number)
                yield from self._back(peer.number, event.moment)
            case PeerLeft(peer=peer):
                self._away(peer.number, event.moment)
            case Arrived(sender=sender) if sender.kind != DEVICE:
                yield Reply(token=event.token, answer=_answer(event, encode(Invitation(refused="no device"))))
            case Arrived(op=Push(key=key)) if key == JOIN:
                yield Reply(token=event.token, answer=self._admit(event))
                yield from self._back(event.sender.number, event.moment)
            case Arrived():
                yield from self._heard(event)
            case Elapsed():
                yield from self._rounds.settle(event.moment)
        for client in [client for client, until in self._absent.items() if until <= event.moment]:
            del self._absent[client]
            yield from self._rounds.react(_left(client, event.moment))

    def _admit(self, event: Arrived) -> Receipt:
        device = event.sender.number
        try:
            request = decode(event.op.about if isinstance(event.op, Push) else "", JoinRequest, event.sender)
            number = self._enrollment.admit(device, request.number, self.present - {device}, self._expected())
        except (ConnectError, MalformedError) as refusal:
            return Receipt(version=0, about=encode(Invitation(refused=str(refusal))))
        except CheckpointError as error:
            if not self._said_full:
                notice(f"No other device can join, and the rounds go on with those that have: {error}")
            self._said_full = True
            return Receipt(version=0, about=encode(Invitation(refused=FULL)))
        return Receipt(version=0, about=encode(msgspec.structs.replace(self._invitation, number=number)))

    def _expected(self) -> set[int]:
        """Numbers of devices that may be back: they have a task or a report, or are away for a moment."""
        roster = self._rounds.roster
        return {*self._rounds.assigned, *self._absent, *roster.unheard}

    def _heard(self, event: Arrived) -> Iterator[Reply]:
        device = event.sender.number
        number = self._enrollment.number(device)
        if number is None:
            yield Reply(token=event.token, answer=_answer(event, UNKNOWN))
            return
        yield from self._back(device, event.moment)
        match event.op:
            case Push(key=key) if key == LEAVE:
                self.joined.discard(device)
                self._absent.pop(number, None)
                yield from self._rounds.react(_left(number, event.moment))
                yield Reply(token=event.token, answer=Receipt(version=self._rounds.model.version))
                return
            case Pull(key=key) if key == TASK:
                self._rounds.roster.take_asks(number)  # what it asks now is all that it waits for
        yield from self._rounds.react(replace(event, sender=Peer(CLIENT, number)))

    def _back(self, device: int, moment: float) -> Iterator[Reply]:
        number = self._enrollment.number(device)
        if number is not None and device in self.present and device not in self.joined:
            self.joined.add(device)
            self._absent.pop(number, None)
            yield from self._rounds.react(PeerJoined(moment=moment, peer=Peer(CLIENT, number)))

    def _away(self, device: int, moment: float) -> None:
        """Its connection is gone, and so are the asks that came through it: they will come again."""
        self.present.discard(device)
        number = self._enrollment.number(device)
        if number is None or device not in self.joined:
            return
        self.joined.discard(device)
        self._rounds.roster.take_asks(number)
        self._absent[number] = moment + self._patience.absent_seconds


def _left(client: int, moment: float) -> PeerLeft:
    return PeerLeft(moment=moment, peer=Peer(CLIENT, client))


def _answer(event: Arrived, about: str) -> Answer:
    kind = Receipt if isinstance(event.op, Push) else Pulled
    return kind(version=-1, about=about)
