"""Elastic runs in virtual time: workers that are killed, stopped, cut off and resized, and what must hold all the same.

A worker's machine is three peers that share its fate: a trainer, which makes transactions; a listener, which shows the
others what this worker has said; and an agent, which follows the coordinator's news. A transaction is an all-gather:
each offers its part and pulls those of all others, so who completes it has heard of everybody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from gossamer.base.peer_ops import (
    WORKER,
    Arrived,
    Await,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerOp,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.base.rng import address
from gossamer.comm.membership.coordinator import Coordinator, coordinate
from gossamer.comm.membership.journal import MemoryJournal, ViewJournal
from gossamer.comm.membership.member import MemberScripts
from gossamer.comm.membership.messages import ATTACHED, COORDINATOR, HERE, HERE_AGAIN, READY, RESIZE, WorkerReport
from gossamer.comm.membership.next_view import CoordinatorOptions, ViewPolicy
from gossamer.comm.membership.view import View
from gossamer.comm.runtime.transaction import Resolution, resolve
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import (
    Cut,
    Fault,
    Kill,
    Link,
    Pause,
    Restart,
    VirtualNetwork,
    random_faults,
)
from gossamer.errors import PeerLost

TRAINER, AGENT = "trainer", "agent"
ROLES = (WORKER, TRAINER, AGENT)  # WORKER is the listener
HORIZON_SECONDS = 20.0  # then all faults have ended
DEAD_AFTER_SECONDS = 1.0
STALL_SECONDS = 1.5  # after which a trainer gives up a member that does not answer
END_AFTER_SECONDS = 60.0  # longer than any fault: then who has the parameters is dead
MOST_SECONDS = 400.0  # until a run has ended, whatever happened
LIKE = json.dumps({"recipe": "EveryStep()"})

Entry = tuple[int, int, tuple[int, ...]]  # a completed transaction: its number, its view, and who contributed


class ViewBroke(Exception):
    """Not an error: a worker goes on in the next view. suspects: who did not answer."""

    def __init__(self, *suspects: int) -> None:
        self.suspects = suspects


@dataclass(eq=False)
class Process:
    """One start of a worker: what it has completed, and what it shows the others in which view."""

    number: int
    machine: int
    transactions: int
    scripts: MemberScripts = field(init=False)
    step: int = 0  # the transaction that its training loop is at
    entries: list[Entry] = field(default_factory=list)
    agreed: dict[int, tuple[Entry, ...]] = field(default_factory=dict)  # by view: what it went on from
    views: dict[int, View] = field(default_factory=dict)
    shown: dict[tuple[int, str], str] = field(default_factory=dict)
    view: int = 0  # the one in which it is
    closed: int = 0  # the newest that it has closed
    has_ended: bool = False  # killed, out, or done
    is_done: bool = False
    went_on: bool = False

    def __post_init__(self) -> None:
        report = WorkerReport(number=self.number, host=f"machine-{self.machine}", port=self.machine, place=self.machine)
        self.scripts = MemberScripts(report, self.close)

    def close(self, view: int) -> None:
        self.closed = max(self.closed, view)

    def answer(self, view: int, what: str) -> Pulled | None:
        """What others are told; None while there is nothing to tell yet."""
        if self.has_ended or view < self.view or view <= self.closed:
            return Pulled(version=-1)
        text = self.shown.get((view, what)) if view == self.view else None
        return None if text is None else Pulled(version=0, about=text)

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def train(self) -> PeerScript:
        """Complete all transactions, in whatever views; returns whether this process is done."""
        standing = yield from self.scripts.send_report(HERE)
        if standing.formed:
            self.scripts.learn(ready=True, fingerprint=LIKE)
            yield from self.scripts.send_report(READY)
        while (view := (yield from self.next_view())) is not None:
            self.view, self.went_on = view.number, False
            self.views[view.number] = view
            if not standing.formed and view.number == 1:
                self.scripts.learn(fingerprint=LIKE)
                yield from self.scripts.send_report(ATTACHED)
            try:
                yield from self.go_on_in(view)
                self.is_done = True
                yield from self.scripts.report_leave(finished=True)
                self.has_ended = True
                return True
            except ViewBroke as broke:
                self.close(view.number)
                yield from self.poke()
                yield from self.scripts.report_broken(view.number, broke.suspects, "nobody answers", self.went_on)
        self.has_ended = True
        return False

    def next_view(self) -> Generator[PeerOp, Any, View | None]:
        """The next view, once there is one that holds; None where this process is out."""
        while not self.scripts.out:
            view = self.scripts.view
            if view is not None and view.number > max(self.view, self.scripts.over, self.closed):
                return view
            yield from compute(0.05)
        return None

    def go_on_in(self, view: View) -> PeerScript:
        """Agree with the others on what is completed, then make transactions until all are."""
        yield from self.agree(view)
        while self.step < self.transactions:
            yield from compute(0.3)
            parts = yield from self.gather(view, f"transaction {self.step}", str(view.number))
            self.commit(view, parts)
        yield from self.gather(view, "closing", "")

    def commit(self, view: View, parts: dict[int, str]) -> None:
        assert set(parts.values()) == {str(view.number)}, f"parts of several views in {view.number}: {parts}"
        self.entries.append((self.step, view.number, tuple(sorted(parts))))
        self.step += 1
        self.went_on = True

    def agree(self, view: View) -> PeerScript:
        """Compare counts; finish the transaction that broke, or have it made again; take the state, as a newcomer."""
        counts = yield from self.gather(view, "completed", str(self.step))
        survivors = {each: int(count) for each, count in counts.items() if each not in view.newcomers}
        resolution = self.resolve(survivors)
        first = next(each.number for each in view.members if each.number not in view.newcomers)
        donor = first if self.number in view.newcomers else resolution.donors.get(self.number)
        if donor is not None:
            entries = json.loads((yield from self.pull(view, donor, "state")))
            taken: list[Entry] = [(step, made_in, tuple(who)) for step, made_in, who in entries]
            self.entries = taken if self.number in view.newcomers else [*self.entries, taken[-1]]
            self.step = resolution.completed
        if self.number in view.newcomers:
            self.scripts.learn(has_state=True)
            yield from self.scripts.send_report(HERE_AGAIN)
        self.agreed[view.number] = tuple(self.entries)
        self.shown[view.number, "state"] = json.dumps(self.entries)
        yield from self.poke()

    def resolve(self, survivors: dict[int, int]) -> Resolution:
        return resolve(survivors)

    def gather(self, view: View, what: str, mine: str) -> Generator[PeerOp, Any, dict[int, str]]:
        """All members' parts, by number."""
        self.shown[view.number, what] = mine
        yield from self.poke()
        parts = {self.number: mine}
        for each in view.members:
            if each.number != self.number:
                parts[each.number] = yield from self.pull(view, each.number, what)
        return parts

    def pull(self, view: View, number: int, what: str) -> Generator[PeerOp, Any, str]:
        """What another member shows. Raises ViewBroke."""
        machine = view.members[view.rank_of(number)].port
        try:
            pulled: Pulled = yield Pull(
                of=Peer(WORKER, machine), key=f"{number}/{view.number}/{what}", within_seconds=STALL_SECONDS
            )
        except PeerLost:
            raise ViewBroke(number) from None
        if pulled.version < 0 or self.closed >= view.number:
            raise ViewBroke
        return pulled.about

    def poke(self) -> PeerScript:
        """Let the listener look at what this process shows."""
        yield Push(to=Peer(WORKER, self.machine), key="poke", stamp=Stamp(self.number, 0))


@dataclass(eq=False)
class Machine:
    """Where one process runs at a time. Its peers are killed and started again together."""

    number: int
    run: ElasticRun
    late_seconds: float
    processes: list[Process] = field(default_factory=list)

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def start(self) -> None:
        if self.processes:
            self.process.has_ended = True
        number = 1000 * len(self.processes) + self.number + 1
        self.processes.append(self.run.process(number=number, machine=self.number, transactions=self.run.transactions))

    def listening(self) -> PeerScript:
        self.start()  # of its peers it is started first
        return self._listen()

    def _listen(self) -> PeerScript:
        waiting: list[tuple[int, int, int, str]] = []
        while True:
            match (yield Await()):
                case Arrived(token=token, op=Pull(key=key)):
                    number, view, what = key.split("/")
                    waiting.append((token, int(number), int(view), what))
                case Arrived(token=token, op=Push()):
                    yield Reply(token=token, answer=Receipt(version=0))
            for each in list(waiting):
                token, to, seen, what = each
                answer = self.process.answer(seen, what) if to == self.process.number else Pulled(version=-1)
                if answer is not None:
                    waiting.remove(each)
                    yield Reply(token=token, answer=answer)

    def training(self) -> PeerScript:
        if len(self.processes) == 1:
            yield from compute(self.late_seconds)
        while not (yield from self.process.train()):
            if self.run.coordinator is not None and self.run.coordinator.rule.ended:
                return
            yield from compute(0.5)
            self.start()  # comes back as another

    def following(self) -> PeerScript:
        while True:
            process, heard = self.process, None
            script = process.scripts.follow()
            while process is self.process and not process.has_ended:
                if process.scripts.formed is None:
                    yield from compute(0.05)  # until the trainer has said that it is here
                    continue
                closed = process.closed
                try:
                    heard = yield script.send(heard)
                except StopIteration:
                    break
                if process.closed > closed:
                    yield from process.poke()
            yield from compute(0.05)


class ElasticRun:
    """One run: machines, a coordinator that may be started again, and somebody who resizes."""

    def __init__(
        self,
        seed: int,
        process: Callable[..., Process] = Process,
        rule: type[Coordinator] = Coordinator,
        journal: Callable[[], ViewJournal] | None = None,
        view_policy: type[ViewPolicy] = ViewPolicy,
    ) -> None:
        self.random = Random(address("elastic run", seed))
        self.seed, self.process, self._rule, self._view_policy = seed, process, rule, view_policy
        self.transactions = self.random.randint(15, 50)
        self.count, self.notes = self.random.randint(2, 5), list[str]()
        initial = self.random.randint(1, self.count)
        self.machines = [
            Machine(each, self, 0.0 if each < initial else self.random.uniform(0.5, 15.0)) for each in range(self.count)
        ]
        self.initial, self.least = initial, self.random.randint(1, max(1, initial - 1))
        self.most = self.random.randint(initial, self.count)
        kept = MemoryJournal()
        self._journal = journal or (lambda: kept)
        self.coordinator: Coordinator | None = None
        self.trace: Trace | None = None

    # -- peers ---------------------------------------------------------------------------------------------------------

    def coordinating(self) -> PeerScript:
        draw = Random(self.random.random())
        options = CoordinatorOptions(
            least=self.least,
            most=self.most,
            initial=self.initial,
            dead_after_seconds=DEAD_AFTER_SECONDS,
            patience_seconds=10.0,
            end_after_seconds=END_AFTER_SECONDS,
        )
        self.coordinator = coordinator = self._rule(
            self._view_policy(options, self._journal(), self.notes.append, draw.randbytes)
        )
        return coordinate(coordinator, lambda event: coordinator.react(_of_one_peer(event)))

    def resizing(self) -> PeerScript:
        for _ in range(self.random.choice((0, 0, 1, 2))):
            yield from compute(self.random.uniform(1, HORIZON_SECONDS / 2))
            most = self.random.randint(self.least, self.count)
            yield Push(to=COORDINATOR, key=RESIZE, stamp=Stamp(0, most))

    # -- the world -----------------------------------------------------------------------------------------------------

    def network(self) -> VirtualNetwork:
        machines = [Peer(WORKER, each) for each in range(self.count)]
        everyone = [*machines, COORDINATOR]
        faults = random_faults(self.random, everyone, HORIZON_SECONDS, everyone)
        if self.count > 2 and self.random.random() < 0.3:  # both live, and never reach each other
            one, other = self.random.sample(machines, 2)
            faults += (Cut((one,), (other,), self.random.uniform(0, HORIZON_SECONDS / 2), HORIZON_SECONDS),)
        return VirtualNetwork(
            round_trip_seconds=self.random.choice((0.0, 0.002, 0.05)),
            jitter_seconds=self.random.choice((0.0, 0.01, 0.05)),
            loss=self.random.choice((0.0, 0.0, 0.05)),
            duplicate=self.random.choice((0.0, 0.05, 0.25)),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            resend_seconds=0.2,
            faults=of_all_roles(faults),
            links=within_machines(self.count),
        )

    def go(self, keep: bool = False) -> ElasticRun:
        """Run until all trainers have ended. Raises AssertionError where they do not."""
        scripts: dict[Peer, Callable[[], PeerScript]] = {COORDINATOR: self.coordinating}
        for machine in self.machines:
            scripts[Peer(WORKER, machine.number)] = machine.listening
            scripts[Peer(TRAINER, machine.number)] = machine.training
            scripts[Peer(AGENT, machine.number)] = machine.following
        scripts[Peer("control", 0)] = self.resizing
        servers = [each for each in scripts if each.kind != TRAINER]
        self.trace = simulate_peers(
            scripts,
            self.network(),
            self.seed,
            servers=servers,
            keep=keep,
            most_words=500_000,
            most_seconds=MOST_SECONDS,
        )
        return self

    @property
    def processes(self) -> list[Process]:
        return [process for machine in self.machines for process in machine.processes]


def _of_one_peer(event: PeerEvent) -> PeerEvent:
    """As where a machine's peers are one: the agent is that whose coming and going a coordinator sees."""
    match event:
        case PeerJoined(peer=peer) | PeerLeft(peer=peer) if peer.kind != AGENT:
            return PeerEvent(moment=event.moment)
        case Arrived(sender=sender) if sender.kind == TRAINER:
            return replace(event, sender=Peer(AGENT, sender.number))
    return event


def within_machines(count: int) -> Mapping[tuple[Peer, Peer], Link]:
    """Between peers of one machine nothing is delayed or lost."""
    return {(Peer(one, each), Peer(other, each)): Link() for each in range(count) for one in ROLES for other in ROLES}


def of_all_roles(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """A machine's peers share its fate."""
    return tuple(each for fault in faults for each in _of_all_roles(fault))


def _of_all_roles(fault: Fault) -> Iterator[Fault]:
    match fault:
        case Cut(peers_a, peers_b):
            yield replace(fault, peers_a=_all_roles(peers_a), peers_b=_all_roles(peers_b))
        case Kill() | Restart() | Pause():
            yield from (replace(fault, peer=each) for each in _all_roles([fault.peer]))


def _all_roles(peers: Sequence[Peer]) -> tuple[Peer, ...]:
    return tuple(
        each for peer in peers for each in ([peer] if peer == COORDINATOR else [Peer(r, peer.number) for r in ROLES])
    )
