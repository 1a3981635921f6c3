"""Reception: the server's script between devices, which join and leave, and the rounds.

It admits devices and maps identities to client numbers. A device with a broken connection is not chosen, but keeps its
task and its uploaded parts for a while, since phones sleep. The server does not wait for a device that leaves.

The connection's handshake compares everything known before joining: Gossamer's version, the name RUN, and the
fingerprint of the script's model. The invitation has the recipe, so a device needs only the script and the server's
address.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from gossamer.base.json_text import read_json
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
from gossamer.federated.deployment.files import replace_file
from gossamer.federated.messages import CLIENT, PART_BYTES, TASK, Count, decode, encode
from gossamer.federated.server.rounds import Rounds

DEVICE = "device"  # the kind of a joining peer; its number is a random identity, not the client's number
RUN = "federated"  # name of every federation, so that training runs and federations reject each other
JOIN, LEAVE = "join", "leave"  # keys of requests
UNKNOWN = '{"unknown":true}'  # answer to a device that has not joined, or that a restarted server does not know


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of a device to join."""

    number: Count | None = None  # the requested client number; None: any that is free


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terms of the federation for a joining device, or the reason why it was refused."""

    refused: str = ""
    federation: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]*\Z", max_length=64)] = ""  # random name
    number: Count = 0
    recipe: Annotated[str, msgspec.Meta(max_length=100_000)] = ""
    clients: Count = 0
    rounds: Count = 0
    seed: Count = 0
    part_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**32)] = PART_BYTES


class Enrollment:
    """Client numbers from 0 to `clients` - 1, each of at most one device.

    A device keeps its number while it is present and until it is replaced. Another device may request the number of an
    absent one, since a device that lost its state has a new identity.
    """

    def __init__(self, clients: int, path: Path | None = None) -> None:
        """path: the file that keeps the numbers. Raises CheckpointError if it is damaged."""
        self._clients, self._path = clients, path
        self._numbers: dict[int, int] = {}  # by device
        if path is not None and path.is_file():
            self._read(path)

    def number(self, device: int) -> int | None:
        """The number of a device that has joined."""
        return self._numbers.get(device)

    @property
    def numbers(self) -> Collection[int]:
        """All numbers in use."""
        return self._numbers.values()

    def admit(self, device: int, wanted: int | None, present: Container[int], kept: Container[int] = ()) -> int:
        """Admit a device.

        Args:
            device: its identity.
            wanted: the requested number; None: any.
            present: identities of present devices.
            kept: numbers of devices that may return, which are given only on request.

        Returns:
            The client number.

        Raises:
            ConnectError: the requested number, or every number, is in use.
            CheckpointError: the number cannot be stored. Nothing has changed.
        """
        if wanted is not None and wanted >= self._clients:
            raise ConnectError(
                f"There is no client {wanted} in a federation of {self._clients}: write --number 0 to "
                f"{self._clients - 1}, or leave it out."
            )
        holders = {number: holder for holder, number in self._numbers.items()}
        own = self._numbers.get(device)
        if own is not None and wanted in (None, own):
            return own
        number = self._free(holders, present, kept) if wanted is None else wanted
        holder = holders.get(number)
        if holder is not None and holder in present:
            raise ConnectError(
                f"Client {number} is connected already, as another device. Give every device its own --number, or "
                "leave it out, so that the server chooses."
            )
        numbers = {each: own for each, own in self._numbers.items() if each != holder} | {device: number}
        self._write(numbers)
        self._numbers = numbers
        return number

    def _free(self, holders: dict[int, int], present: Container[int], kept: Container[int]) -> int:
        """An unused number, or else one of an absent device that is not expected to return."""
        everyone = range(self._clients)
        never = (number for number in everyone if number not in holders)
        away = (number for number in everyone if holders.get(number) not in present and number not in kept)
        number = next(never, None)
        number = next(away, None) if number is None else number
        if number is None:
            raise ConnectError(
                f"All {self._clients} clients of this federation have joined, and may return. Start its server "
                "with a larger --clients, leave this device out, or give it the --number of one that is gone for good."
            )
        return number

    def _read(self, path: Path) -> None:
        try:
            found = read_json(path.read_bytes())
            self._numbers = {int(device): int(number) for device, number in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so devices could get each other's numbers, and contributions could "
                "count twice. Restore a copy of the journal's folder, or begin a new one: --journal OTHER"
            ) from error

    def _write(self, numbers: dict[int, int]) -> None:
        if self._path is not None:
            replace_file(self._path, json.dumps({str(device): number for device, number in numbers.items()}))


POLL_SECONDS = 0.25  # interval of checks for a stop
FULL = "Its disk has no room for another number. Free some space there, and start this device again."


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits for absent devices, in seconds."""

    absent_seconds: float = 300.0  # a device without a connection keeps its task for so long
    farewell_seconds: float = 30.0  # after the last round, until devices know that the federation has ended


class Reception:
    """Tracks present and expected devices, by their random identities."""

    def __init__(self, rounds: Rounds, enrollment: Enrollment, invitation: Invitation, patience: Patience) -> None:
        self._rounds, self._enrollment, self._invitation, self._patience = rounds, enrollment, invitation, patience
        self.present: set[int] = set()  # connected devices
        self.joined: set[int] = set()  # connected devices with a client number
        self._absent: dict[int, float] = {}  # by client number: time until which it is expected
        self._finished_at = inf
        self._reported_full = False

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
            event = None  # type: ignore[assignment]  # release the event's tensors while waiting
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
                before = self._enrollment.number(event.sender.number)
                yield Reply(token=event.token, answer=self._admit(event))
                yield from self._leave_number(event.sender.number, before, event.moment)
                yield from self._back(event.sender.number, event.moment)
            case Arrived():
                yield from self._received(event)
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
            if not self._reported_full:
                notice(f"No further device can join; the rounds continue with the enrolled devices: {error}")
            self._reported_full = True
            return Receipt(version=0, about=encode(Invitation(refused=FULL)))
        return Receipt(version=0, about=encode(msgspec.structs.replace(self._invitation, number=number)))

    def _leave_number(self, device: int, before: int | None, moment: float) -> Iterator[Reply]:
        """A device that was given another number leaves under the one before."""
        if before is not None and self._enrollment.number(device) != before:
            self.joined.discard(device)
            self._absent.pop(before, None)
            yield from self._rounds.react(_left(before, moment))

    def _expected(self) -> set[int]:
        """Numbers of devices that may return: they have a task or a report, or are absent for a moment."""
        roster = self._rounds.roster
        return {*self._rounds.assigned, *self._absent, *roster.unheard}

    def _received(self, event: Arrived) -> Iterator[Reply]:
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
                self._rounds.roster.take_asks(number)  # replaced by this request
        yield from self._rounds.react(replace(event, sender=Peer(CLIENT, number)))

    def _back(self, device: int, moment: float) -> Iterator[Reply]:
        number = self._enrollment.number(device)
        if number is not None and device in self.present and device not in self.joined:
            self.joined.add(device)
            self._absent.pop(number, None)
            yield from self._rounds.react(PeerJoined(moment=moment, peer=Peer(CLIENT, number)))

    def _away(self, device: int, moment: float) -> None:
        """The device's connection was lost, with its requests, which it will send again."""
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
