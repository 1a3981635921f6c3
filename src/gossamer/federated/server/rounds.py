"""Rounds: who has which task, whose report came, and when a version is made of them. No clock, no sockets.

An assignment is a task given to a device: answered alike however often it asks. A report is checked, added and held;
its receipt is given when the version that it is part of was made and journaled, so whoever has one knows that it counts
for ever. What is said twice is answered twice and added once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from gossamer.core import rng
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Arrived, Peer, PeerEvent, PeerLeft, Pull, Pulled, Push, Receipt, Reply, Stamp
from gossamer.errors import MalformedError
from gossamer.federated.messages import (
    CLIENT,
    FATE_UNKNOWN,
    NOT_COUNTED,
    PART,
    REPORT,
    TASK,
    Fate,
    Report,
    Scalar,
    SecureTask,
    Task,
    decode,
    encode,
)
from gossamer.federated.server.admission import ContributionLimits
from gossamer.federated.server.contribution_sum import ContributionSum, sum_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.selection import SelectionPolicy
from gossamer.federated.upload import assembled
from gossamer.strategies.federated import LocalWork


@dataclass(frozen=True)
class Assignment:
    """A task that a device was given."""

    round: int
    version: int
    moment: float  # when it was given


@dataclass
class Reported:
    """A report that was added, and the asks that wait to hear its fate."""

    report: Report
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Committed:
    """A version that was made, for the record."""

    version: int
    moment: float
    reports: Mapping[int, Report]  # by client


class RoundsJournal(Protocol):
    """Keeps what a killed server goes on from."""

    def begun(self, rounds: Rounds) -> None:
        """Assignments were made; called before devices hear of them."""

    def committed(self, rounds: Rounds) -> None:
        """A version was made; called before any receipt is given."""


class NoRoundsJournal(RoundsJournal):
    """Nothing is kept."""

    def begun(self, rounds: Rounds) -> None: ...

    def committed(self, rounds: Rounds) -> None: ...


class Rounds(ABC):
    """The state of a federation beside its model, and how it reacts to events."""

    def __init__(
        self,
        model: GlobalModel,
        *,
        clients: int,
        rounds: int,
        selection: SelectionPolicy,
        admission: ContributionLimits | None = None,
        config: Mapping[str, Scalar] | None = None,
        journal: RoundsJournal | None = None,
        on_commit: Any = None,
    ) -> None:
        """clients: of the whole federation, of which a strategy's fraction is. rounds: versions to make."""
        self.model, self.clients, self.rounds, self.selection = model, clients, rounds, selection
        self.admission = admission or ContributionLimits()
        self.config = dict(config or {})
        self.journal: RoundsJournal = journal or NoRoundsJournal()
        self.on_commit = on_commit or (lambda committed: None)
        self.assigned: dict[int, Assignment] = {}
        self.reported: dict[int, Reported] = {}
        self.fates: dict[int, tuple[int, int]] = {}  # by client: its last round, and the version that counted it
        self.waiting: dict[int, dict[int, Pull]] = {}  # by client: its asks for a task, by token
        self.refused: dict[int, str] = {}  # this round's, by client
        self.next_round = 0
        self.sum: ContributionSum = sum_for(model.strategy)
        self._parts: dict[int, tuple[int, dict[int, Any]]] = {}

    @property
    def finished(self) -> bool:
        return self.model.version >= self.rounds

    @property
    def due(self) -> float:
        """The moment at which something is to be done though nothing has happened."""
        return inf

    @abstractmethod
    def assign(self, moment: float) -> list[int]:
        """Make assignments among the devices that wait; returns whose."""

    @abstractmethod
    def is_complete(self, moment: float) -> bool:
        """Whether the next version is made now. Called with at least one report."""

    @abstractmethod
    def staleness_allowed(self, assignment: Assignment) -> bool:
        """Whether what was begun from that version may still count."""

    @abstractmethod
    def open_anew(self, moment: float) -> None:
        """A version was made, or given up: what begins with that."""

    def is_hopeless(self, moment: float) -> bool:
        """Whether the reports that are there are given up, since too few others can come."""
        return False

    # Events.

    def react(self, event: PeerEvent) -> Iterator[Reply]:
        match event:
            case Arrived(token=token, sender=sender) if sender.kind != CLIENT:
                why = f"{sender} is no client of a federation; nothing of what it sent was used"
                yield Reply(token=token, answer=_refusal(why))
            case Arrived(token=token, sender=sender, op=Pull(key=key) as pull) if key == TASK:
                self.waiting.setdefault(sender.number, {})[token] = pull
            case Arrived(token=token, sender=sender, op=Push() as push):
                answer = self._pushed(sender.number, push, token)
                if answer is not None:
                    yield Reply(token=token, answer=answer)
            case Arrived(token=token, op=op):
                yield Reply(token=token, answer=_refusal(f"a federation has nothing under {op.key!r}"))
            case PeerLeft(peer=peer):
                self.waiting.pop(peer.number, None)
                self._parts.pop(peer.number, None)
                self.left(peer.number)
        yield from self.settle(event.moment)

    @abstractmethod
    def left(self, client: int) -> None:
        """A device cannot be heard any more."""

    def settle(self, moment: float) -> Iterator[Reply]:
        """Make what is due: versions, receipts, assignments."""
        while self.reported and not self.finished and self.is_complete(moment):
            yield from self._commit(moment)
        if self.is_hopeless(moment):
            yield from self._give_up(moment)
        if self.finished:
            yield from self._dismiss()
            return
        if self.assign(moment):
            self.journal.begun(self)
        yield from self._give_tasks()

    # Pushes.

    def _pushed(self, client: int, push: Push, token: int) -> Receipt | None:
        try:
            return self._receive(client, push, token)
        except MalformedError as error:
            self._refuse(client, str(error))
            return _refusal(str(error))

    def _refuse(self, client: int, why: str) -> None:
        assignment = self.assigned.pop(client, None)
        if assignment is not None:
            self.refused[client] = why
            self.fates[client] = assignment.round, NOT_COUNTED

    def _receive(self, client: int, push: Push, token: int) -> Receipt | None:
        stamp = push.stamp
        if stamp.worker != client:
            raise MalformedError(f"client {client} sent a contribution of client {stamp.worker}; it was not used")
        assignment = self.assigned.get(client)
        if assignment is None or (assignment.round, assignment.version) != (stamp.step, stamp.known):
            return self._answered_before(client, stamp)
        if push.key == PART:
            return self._take_part(client, stamp, push)
        if push.key != REPORT:
            return self.other_push(client, push, token)
        if client in self.reported:
            self.reported[client].tokens.append(token)
            return None
        report = decode(push.about, Report, Peer(CLIENT, client))
        self.admission.check_report(client, report, self.model.state.fingerprint())
        missing = self._missing(client, stamp, report)
        if missing:
            return Receipt(version=FATE_UNKNOWN, about=encode(Fate(missing=missing)))
        if not self.staleness_allowed(assignment):
            self._refuse(client, f"client {client} was too slow")
            return Receipt(version=NOT_COUNTED, about=encode(Fate()))
        payload = assembled(self._taken(client), report.shapes) if report.parts else push.payload
        self.take(client, stamp, report, payload)
        self._parts.pop(client, None)
        self.reported[client] = Reported(report, [token])
        return None

    def take(self, client: int, stamp: Stamp, report: Report, payload: Payload) -> None:
        """Add a contribution to the sum. Raises MalformedError, before anything is changed."""
        blocks = self.model.decode(stamp, payload, report.counts)
        self.admission.check_blocks(client, blocks)
        work = LocalWork(samples=report.samples, steps=report.steps, learning_rate=report.learning_rate)
        staleness = self.model.version - stamp.known
        self.sum.add(blocks, self.model.strategy.weight(work, staleness), report.steps)

    def other_push(self, client: int, push: Push, token: int) -> Receipt | None:
        """What an assigned device pushes beside parts and reports; None: it is answered later."""
        raise MalformedError(f"client {client} sent {push.key!r}, which is no part of a contribution")

    def _answered_before(self, client: int, stamp: Stamp) -> Receipt:
        index, version = self.fates.get(client, (-1, NOT_COUNTED))
        return Receipt(version=version if index == stamp.step else NOT_COUNTED, about=encode(Fate()))

    def _take_part(self, client: int, stamp: Stamp, push: Push) -> Receipt:
        if not push.about.isdecimal() or int(push.about) >= self.admission.most_parts or len(push.payload) != 1:
            raise MalformedError(f"client {client} sent a part {push.about[:20]!r} of a contribution, which is none")
        index, parts = self._parts.setdefault(client, (stamp.step, {}))
        if index != stamp.step:
            parts = {}
            self._parts[client] = stamp.step, parts
        parts.setdefault(int(push.about), push.payload[0])
        return Receipt(version=FATE_UNKNOWN)

    def _missing(self, client: int, stamp: Stamp, report: Report) -> tuple[int, ...]:
        if report.parts > self.admission.most_parts:
            raise MalformedError(f"client {client} announces {report.parts} parts of a contribution")
        index, parts = self._parts.get(client, (stamp.step, {}))
        return tuple(number for number in range(report.parts) if index != stamp.step or number not in parts)

    def _taken(self, client: int) -> list[Any]:
        _, parts = self._parts[client]
        return [parts[number] for number in sorted(parts)]

    # Versions.

    def _commit(self, moment: float) -> Iterator[Reply]:
        means, cohort = self.sum.means(), self.sum.summary(self.clients)
        version = self.model.apply(means, cohort)
        done, self.reported = self.reported, {}
        for client in done:
            self.fates[client] = self.assigned.pop(client).round, version
        self.sum = sum_for(self.model.strategy)
        self.open_anew(moment)
        self.journal.committed(self)
        self.on_commit(Committed(version, moment, {client: each.report for client, each in done.items()}))
        self.refused = {}
        yield from _told(done, version)

    def _give_up(self, moment: float) -> Iterator[Reply]:
        """Forget what was assigned and reported: nothing of it counts, and whoever reported hears so."""
        done, self.reported = self.reported, {}
        for client, assignment in self.assigned.items():
            self.fates[client] = assignment.round, NOT_COUNTED
        self.sum = sum_for(self.model.strategy)
        self.open_anew(moment)
        yield from _told(done, NOT_COUNTED)

    # Tasks.

    def _give_tasks(self) -> Iterator[Reply]:
        for client in [client for client in self.assigned if client in self.waiting and client not in self.reported]:
            assignment = self.assigned[client]
            for token, pull in self.waiting.pop(client).items():
                yield Reply(token=token, answer=self._task(client, assignment, pull))

    def _task(self, client: int, assignment: Assignment, pull: Pull) -> Pulled:
        """What a device is told of its assignment, as often as it asks."""
        pulled = self.model.pulled_since(pull.known)
        task = Task(
            round=assignment.round,
            version=pulled.version,
            chain=pulled.about,
            config=self.config,
            seed=rng.address(self.model.seed, "task", client, assignment.round) >> 11,
            secure=self.secure_task(),
        )
        if pulled.version != assignment.version:
            self.assigned[client] = Assignment(assignment.round, pulled.version, assignment.moment)
        return Pulled(version=pulled.version, payload=pulled.payload, about=encode(task))

    def secure_task(self) -> SecureTask | None:
        """How this round's contributions are masked."""
        return None

    def _dismiss(self) -> Iterator[Reply]:
        over = Task(round=self.next_round, version=self.model.version, finished=True)
        waiting, self.waiting = self.waiting, {}
        for tokens in waiting.values():
            for token in tokens:
                yield Reply(token=token, answer=Pulled(version=self.model.version, about=encode(over)))
        done, self.reported = self.reported, {}
        yield from _told(done, NOT_COUNTED)

    def give(self, client: int, moment: float) -> None:
        """Assign the next task to a device."""
        self.assigned[client] = Assignment(self.next_round, self.model.version, moment)

    def available(self) -> list[int]:
        """Devices that wait for a task and have none, ascending."""
        return sorted(client for client in self.waiting if client not in self.assigned)


def _refusal(why: str) -> Receipt:
    return Receipt(version=NOT_COUNTED, about=encode(Fate(refused=why[:500])))


def _told(done: Mapping[int, Reported], version: int) -> Iterator[Reply]:
    """Receipts for all who wait to hear what became of their reports."""
    for each in done.values():
        for token in each.tokens:
            yield Reply(token=token, answer=Receipt(version=version, about=encode(Fate())))
