"""Rounds: tasks, reports, and the versions made from them, driven by events, without clocks or sockets.

An assignment is a task given to a device; repeated requests get the same answer. The server checks a report, adds it to
the sum and holds its receipt until the version is made and journaled. A receipt that names a version therefore means
that the contribution is counted permanently. A repeated message gets the same answer and is added once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from gossamer.algorithms.strategies.federated_rules import LocalWork
from gossamer.base import rng
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import (
    Answer,
    Arrived,
    Ask,
    Await,
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
    Stamp,
)
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.federated.federation import RoundConfig, config_by_round
from gossamer.federated.messages import (
    CLIENT,
    FATE_UNKNOWN,
    NOT_COUNTED,
    PART,
    REPORT,
    TASK,
    THE_SERVER,
    Fate,
    Report,
    SecureTask,
    Task,
    Uploads,
    encode,
)
from gossamer.federated.privacy.accountant import accountant_for, private_selection
from gossamer.federated.privacy.clipping_and_noise import private_sum
from gossamer.federated.server.admission import Attempts, ContributionAdmission, ContributionLimits
from gossamer.federated.server.aggregation import ContributionSum, sum_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.journal import RoundsJournal, refuse_others
from gossamer.federated.server.roster import MOST_ASKS, Assignment, Roster, RosterChange
from gossamer.federated.server.selection import SelectionPolicy

LONGEST_REFUSAL = 500  # characters


@dataclass
class Reported:
    """A report that was added, and the requests that wait for its receipt."""

    report: Report
    stamp: Stamp
    moment: float
    tokens: list[int] = field(default_factory=list)

    def hold(self, token: int) -> None:
        self.tokens.append(token)
        del self.tokens[:-MOST_ASKS]


@dataclass(frozen=True)
class Committed:
    """A new version, for the record."""

    version: int
    moment: float
    reports: Mapping[int, Report]  # by client
    refused: Mapping[int, str] = field(default_factory=dict)  # reasons by client, since the previous version
    staleness: Mapping[int, int] = field(default_factory=dict)  # versions made since it began, by client
    epsilon: float | None = None  # privacy loss of any one device over all versions so far; None: without privacy


def receipts(done: Mapping[int, Reported], version: int) -> Iterator[Reply]:
    """Receipts for all requests that wait for the outcome of these reports."""
    for each in done.values():
        for token in each.tokens:
            yield Reply(token=token, answer=Receipt(version=version, about=encode(Fate())))


def refusal(op: Ask, why: str, lineage: str = "") -> Answer:
    """The answer to a refused request, as Pulled or Receipt. lineage: of this server's versions."""
    if isinstance(op, Pull):
        task = Task(round=0, version=0, refused=why[:LONGEST_REFUSAL], lineage=lineage)
        return Pulled(version=-1, about=encode(task))
    return Receipt(version=NOT_COUNTED, about=encode(Fate(refused=why[:LONGEST_REFUSAL])))


def printable(text: str) -> str:
    """Replace control characters, which a terminal would execute."""
    return "".join(each if each.isprintable() else " " for each in text)


@dataclass(frozen=True)
class Gathered:
    """Number of devices (or reports) present and needed, for the status display while the server waits."""

    here: int
    wanted: int
    of: str = "devices that a round begins with"
    then: str = "it begins with"  # the action with fewer, after the gathering time


KEPT = ("model", "roster", "selection", "admission")  # state in a journal, in addition to the accountant's


class Rounds(ABC):
    """The state of a federation, and its reaction to events.

    Args:
        model: the global model.
        clients: devices in the whole federation. A strategy's `fraction` is relative to it.
        rounds: versions to make.
        selection: the policy that samples clients.
        admission: limits on contributions.
        config: configuration sent to devices, fixed or as a function of the round's index.
        on_commit: called with each version after it is journaled. If the server is killed in between, the call can be
            lost.
        return_seconds: after a restart of the server, seconds until a silent device counts as gone.

    Raises:
        RecipeError: the selection does not fit the recipe.
    """

    def __init__(
        self,
        model: GlobalModel,
        *,
        clients: int,
        rounds: int,
        selection: SelectionPolicy,
        admission: ContributionLimits | None = None,
        config: RoundConfig | None = None,
        on_commit: Callable[[Committed], Any] = lambda committed: None,
        return_seconds: float = 60.0,
    ) -> None:
        self.model, self.clients, self.rounds = model, clients, rounds
        # None: no privacy
        self.accountant = accountant_for(model.strategy, model.compressor, model.state, clients)
        self.selection, limits = selection, admission or ContributionLimits()
        if self.accountant is not None:
            self.selection = private_selection(self.accountant, selection)
            if not self.accountant.privacy.on_device:  # contributions must be admitted independently of each other
                limits = replace(limits, largest_ratio=None)
        elif selection.draws_each:
            raise RecipeError(
                f"{type(selection).__name__} draws each device independently, so a cohort can be empty and have no "
                "mean. Leave the selection out, or write privacy=CentralPrivacy(...), which divides by the expected "
                "number of devices."
            )
        self.cohort = model.strategy.cohort(clients)
        self.admission = ContributionAdmission(limits, model.strategy)
        self.config = config_by_round(config)
        self.journal: RoundsJournal | None = None
        self.on_commit, self._return_seconds = on_commit, return_seconds
        self.on_made: Callable[[Committed], Any] | None = None  # like on_commit, but before journaling
        self.roster, self.uploads = Roster(), Uploads()
        self.reported: dict[int, Reported] = {}
        self.refused: dict[int, str] = {}  # by client, since the last version
        self.attempts = Attempts(clients)
        self.deadline = inf  # time of the next action without an event
        self.sum = self._new_sum()
        self.drew_empty = False  # the drawn cohort is empty; the next version is made of noise alone
        self.secure_task: SecureTask | None = None  # terms of masking in this round

    @property
    def assigned(self) -> Mapping[int, Assignment]:
        return self.roster.assigned

    @property
    def finished(self) -> bool:
        if self.model.version >= self.rounds:
            return True
        return self.accountant is not None and self.accountant.exhausted and not self.roster.assigned

    @property
    def why_exhausted(self) -> str:
        """Reason why no further round begins once the privacy budget is spent; else empty."""
        return self.accountant.why if self.accountant is not None and self.accountant.exhausted else ""

    @property
    def due(self) -> float:
        """Time of the next action without an event."""
        return inf if self.finished else min(self.deadline, self.roster.unheard_until)

    @property
    def wanted(self) -> int:
        """Devices that must wait for a task before the server assigns any."""
        return 1

    @property
    def gathered(self) -> Gathered | None:
        """Devices present and needed while the server waits for a round to begin; None while devices train."""
        return Gathered(len(self.roster.ready), self.wanted) if self.is_between_rounds() else None

    @abstractmethod
    def assign(self, moment: float) -> list[int]:
        """Give assignments to ready devices. Returns these devices."""

    @abstractmethod
    def is_complete(self, moment: float) -> bool:
        """Whether to make the next version now. Called with at least one report."""

    @abstractmethod
    def staleness_allowed(self, assignment: Assignment, staleness: int) -> bool:
        """Whether a contribution with this staleness (versions since its start) may still count."""

    @abstractmethod
    def reopen(self, moment: float) -> None:
        """Begin the next round, after a version was made or a round was given up."""

    @abstractmethod
    def is_between_rounds(self) -> bool:
        """Whether the next tasks may belong to a later round although no version was made."""

    def is_hopeless(self, moment: float) -> bool:
        """Whether to give up the present reports, since too few others can arrive."""
        return False

    def all_reported(self) -> bool:
        """Whether every device that has not left has reported and waits for a version."""
        if self.roster.training or self.roster.ready:
            return False
        return len(self.reported) >= self.clients - len(self.roster.away.difference(self.reported))

    def weight(self, work: LocalWork, staleness: int) -> float:
        """The weight of a contribution, above 0. staleness: versions made since its base version."""
        return self.model.strategy.weight(work, staleness)

    def begin(self, moment: float) -> None:
        """Start the server, or restart it with the state from its journal."""
        self.roster.begin(moment, self._return_seconds)

    # Events.

    def react(self, event: PeerEvent) -> Iterator[Reply]:
        match event:
            case Arrived(token=token, sender=sender, op=op) if sender.kind != CLIENT:
                yield Reply(token=token, answer=refusal(op, f"{sender} is no client of a federation"))
            case Arrived(token=token, sender=sender, op=Pull(key=key) as pull) if key == TASK:
                self.roster.mark_present(sender.number)
                yield from self._asked(sender.number, token, pull)
            case Arrived(token=token, sender=sender, op=Push() as push):
                self.roster.mark_present(sender.number)
                try:
                    answer = self._receive(sender.number, push, token, event.moment)
                except MalformedError as error:
                    answer = self._refuse(sender.number, push, str(error))
                if answer is not None:
                    yield Reply(token=token, answer=answer)
            case Arrived(token=token, op=op):
                yield Reply(token=token, answer=refusal(op, f"a federation has nothing under {op.key[:40]!r}"))
            case PeerJoined(peer=peer) if peer.kind == CLIENT:
                self.roster.mark_present(peer.number)
            case PeerLeft(peer=peer) if peer.kind == CLIENT:
                self.left(peer.number)
        yield from self.settle(event.moment)

    def left(self, client: int) -> None:
        """Mark a device as unreachable. Its uploaded parts are kept."""
        self.roster.leave(client)

    def settle(self, moment: float) -> Iterator[Reply]:
        """Make all versions, receipts and assignments that are due."""
        if moment >= self.roster.unheard_until:
            self.roster.count_missing()
        while self.reported and not self.finished and (self.admission.compares(self.sum) or self.is_complete(moment)):
            yield from self._compare() if self.sum.held else self._commit(moment)
        if not self.finished and self.is_hopeless(moment):
            yield from self._give_up(moment, "too few devices reported in time")
        if self.is_between_rounds():
            self.roster.catch_up()
        chosen = [] if self.finished else self.assign(moment)
        while self.drew_empty:
            yield from self._commit(moment)
            chosen = [] if self.finished else self.assign(moment)
        if self.finished:
            yield from self._dismiss()
            return
        if chosen:
            self._note(chosen)
        for client in chosen:
            yield from self._give_task(client)

    # Pushes.

    def _refuse(self, client: int, push: Push, why: str) -> Answer:
        """Discard a contribution and stop waiting for its sender."""
        why = printable(f"client {client} was refused in round {push.stamp.step}: {why}")
        if client in self.roster.assigned and client not in self.reported:
            self.refused[client] = why
            self.attempts.refused(client, why)
            self._drop([client])
        return refusal(push, why)

    def _receive(self, client: int, push: Push, token: int, moment: float) -> Answer | None:
        stamp, assignment = push.stamp, self.roster.assigned.get(client)
        if stamp.worker != client:
            raise MalformedError(f"it sent a contribution of client {stamp.worker}")
        if assignment is None or stamp.step < assignment.round:
            return self._answered_before(client, stamp)
        if stamp.step > assignment.round or not assignment.first <= stamp.known <= assignment.version:
            raise MalformedError(
                f"it sent a contribution for round {stamp.step} from version {stamp.known}, but its task was round "
                f"{assignment.round} from version {assignment.version}"
            )
        if client in self.reported:
            return self._repeated(self.reported[client], push, token)
        if push.key == PART:
            number = self.admission.part_number(push.about, push.payload)
            most_empty = self.model.contribution_size(assignment.round).empty
            self.uploads.add(client, stamp, number, push.payload[0], self.most_bytes(assignment), most_empty)
            return Receipt(version=FATE_UNKNOWN)
        if push.key != REPORT:
            return self.other_push(client, push, token)
        report = self.admission.report(push.about, Peer(CLIENT, client), self.model.state.fingerprint)
        if not report.samples:
            self.attempts.empty(client)
            self._drop([client])
            return Receipt(version=NOT_COUNTED, about=encode(Fate(refused="it had nothing to train on")))
        if report.parts and (missing := self.uploads.missing(client, stamp, report.parts)):
            return Receipt(version=FATE_UNKNOWN, about=encode(Fate(missing=missing)))
        if not self.staleness_allowed(assignment, self.model.version - stamp.known):
            self._drop([client])
            return self._answered_before(client, stamp)
        payload = self.uploads.take(client, report) if report.parts else push.payload
        self.admission.check_size(payload, self.most_bytes(assignment))
        self.take(client, stamp, report, payload)
        self.roster.report(client)
        self.reported[client] = Reported(report, stamp, moment, [token])
        return None

    def most_bytes(self, assignment: Assignment) -> int:
        """Largest allowed size of a contribution, in bytes."""
        return self.admission.most_bytes(self.model.contribution_size(assignment.round).nbytes)

    def take(self, client: int, stamp: Stamp, report: Report, payload: Payload) -> None:
        """Add a contribution to the sum. Raises MalformedError and then changes nothing."""
        blocks = self.model.decode(stamp, payload, report.counts)
        work = LocalWork(samples=report.samples, steps=report.steps, learning_rate=report.learning_rate)
        self.admission.admit(self.sum, client, blocks, self.weight(work, self.model.version - stamp.known), work)

    def other_push(self, client: int, push: Push, token: int) -> Receipt | None:
        """Receive a push other than parts and reports. Returns None if the answer comes later."""
        raise MalformedError(f"it sent {push.key[:40]!r}, which is no part of a contribution")

    def _repeated(self, reported: Reported, push: Push, token: int) -> Receipt | None:
        if push.key != REPORT:
            return Receipt(version=FATE_UNKNOWN)
        if push.stamp != reported.stamp:
            return Receipt(version=NOT_COUNTED, about=encode(Fate()))
        reported.hold(token)
        return None

    def _answered_before(self, client: int, stamp: Stamp) -> Receipt:
        index, version = self.roster.counted.get(client, (-1, NOT_COUNTED))
        return Receipt(version=version if index == stamp.step else NOT_COUNTED, about=encode(Fate()))

    def _compare(self) -> Iterator[Reply]:
        """Add the held contributions that pass the comparison, and answer the refused ones."""
        for client, why in self.admission.compare(self.sum).items():
            reported = self.reported.pop(client)
            answer = self._refuse(client, Push(to=THE_SERVER, key=REPORT, stamp=reported.stamp), why)
            for token in reported.tokens:
                yield Reply(token=token, answer=answer)

    # Versions.

    def _commit(self, moment: float) -> Iterator[Reply]:
        before = self.model.version
        try:
            version = self.model.apply(self.sum.means(), self.sum.summary(self.clients))
        except NotFinite as error:
            yield from self._give_up(moment, str(error))
            return
        done, self.reported = self.reported, {}
        for client, each in done.items():
            self.selection.record_report(client, each.report, each.moment - self.roster.assigned[client].moment)
            self.roster.counted[client] = self.roster.assigned[client].round, version
        self._end(done)
        self.attempts.counted(done)
        if self.accountant is not None:
            self.accountant.committed(done, self.sum.share_below())
        self.sum = self._new_sum()
        self.roster.advance()
        self.reopen(moment)
        refused, self.refused = self.refused, {}
        reports = {client: each.report for client, each in done.items()}
        staleness = {client: before - each.stamp.known for client, each in done.items()}
        epsilon = None if self.accountant is None else self.accountant.epsilon
        committed = Committed(version, moment, reports, refused, staleness, epsilon)
        if self.on_made is not None:
            self.on_made(committed)
        if self.journal is not None:
            self.journal.committed(self)
        self.on_commit(committed)
        yield from receipts(done, version)

    def _give_up(self, moment: float, why: str) -> Iterator[Reply]:
        """Discard the reports of this round; their devices receive NOT_COUNTED."""
        self.attempts.given_up(self.roster.next_round, why, len(self.reported))
        done, self.reported = self.reported, {}
        before = [*self.roster.assigned]
        self._end(done)
        self.sum = self._new_sum()
        self.roster.advance()
        self.reopen(moment)
        self._note(ended=[client for client in before if client not in self.roster.assigned])
        yield from receipts(done, NOT_COUNTED)

    def _drop(self, clients: Iterable[int]) -> None:
        """End assignments without a contribution, and journal this before the devices are answered."""
        ended = [*clients]
        self._end(ended)
        self._note(ended=ended)

    def _end(self, clients: Iterable[int]) -> None:
        for client in [*clients]:
            self.roster.end([client])
            self.uploads.drop(client)

    def _note(self, given: Sequence[int] = (), ended: Sequence[int] = ()) -> None:
        """Account for and journal assignments that were given or ended, before the devices are answered."""
        roster = self.roster
        if self.accountant is not None:
            self.accountant.given(given)
        if self.journal is not None:
            assigned = {client: roster.assigned[client] for client in given}
            self.journal.changed(RosterChange(roster.next_round, roster.given, assigned, ended))

    # Tasks.

    def _asked(self, client: int, token: int, pull: Pull) -> Iterator[Reply]:
        if pull.at_least > self.roster.next_round + 1:
            why = f"client {client} remembers round {pull.at_least - 1} of another federation: give it a new directory"
            yield Reply(token=token, answer=refusal(pull, why, self.model.lineage))  # another lineage resets a device
            return
        self.roster.ask(client, token, pull)
        assignment = self.roster.assigned.get(client)
        if assignment is not None and client not in self.reported:
            if assignment.round < self.roster.first_round(client):  # the device knows that this round does not count it
                self._drop([client])
            else:
                yield from self._give_task(client)

    def _give_task(self, client: int) -> Iterator[Reply]:
        """Answer a device's requests with its assignment. A repeated request restarts it from the current version."""
        assignment, version = self.roster.assigned[client], self.model.version
        self.uploads.drop(client)
        if assignment.version != version:
            assignment = self.roster.assigned[client] = replace(assignment, version=version)
            self._note([client])
        for token, pull in self.roster.take_asks(client).items():
            pulled = self.model.pulled_since(pull.known)
            task = Task(
                round=assignment.round,
                version=version,
                chain=pulled.about,
                config={} if self.config is None else self.config(assignment.round),
                seed=rng.address(self.model.seed, "task", client, assignment.round) >> 11,
                secure=self.secure_task,
                lineage=self.model.lineage,
            )
            yield Reply(token=token, answer=replace(pulled, about=encode(task)))

    def _dismiss(self) -> Iterator[Reply]:
        """End the federation: drop all assignments and answer all waiting devices."""
        done, self.reported = self.reported, {}
        if self.roster.assigned:
            self._drop(self.roster.assigned)
        over = Task(round=self.roster.next_round, version=self.model.version, finished=True)
        for client in [*self.roster.waiting]:
            for token in self.roster.take_asks(client):
                yield Reply(token=token, answer=Pulled(version=self.model.version, about=encode(over)))
        yield from receipts(done, NOT_COUNTED)

    # State in the journal.

    @property
    def next_round(self) -> int:
        return self.roster.next_round

    @property
    def must_be_journaled(self) -> bool:
        """Whether losing the journal does harm: a server without it would spend the same privacy budget twice."""
        return self.accountant is not None

    def state_dict(self) -> dict[str, Any]:
        privacy = {} if self.accountant is None else self.accountant.state_dict()
        return {"identity": self._identity(), "privacy": privacy, **{n: getattr(self, n).state_dict() for n in KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for the state of another federation."""
        refuse_others(state["identity"], self._identity())
        for name in KEPT:
            getattr(self, name).load_state_dict(state[name])
        if self.accountant is not None:
            self.accountant.load_state_dict(state["privacy"])
        self.sum = self._new_sum()

    def change(self, change: RosterChange) -> None:
        """Replay a change from the journal."""
        self.roster.change(change)
        if self.accountant is not None:
            self.accountant.given(change.assigned)

    def start_over(self) -> None:
        """Continue from this version with a new lineage, since devices may hold later versions that are lost here."""
        self.model.start_over()
        self.roster.forget_tasks()

    def _identity(self) -> dict[str, Any]:
        return {"clients": self.clients} | self.model.identity()

    def _new_sum(self) -> ContributionSum:
        if self.accountant is not None:
            return private_sum(self.accountant)
        return sum_for(self.model.strategy.aggregator)


def serve(rounds: Rounds) -> PeerScript:
    """Serve forever. Devices can also connect after the last round, and learn that the federation has ended."""
    event: PeerEvent = yield Await(until=-inf)
    rounds.begin(event.moment)
    while True:
        yield from rounds.react(event)
        due = rounds.due
        event = yield Await(until=due if due < inf else None)
