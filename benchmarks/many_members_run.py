"""Many members in virtual time: the real coordinator, and the real scripts of each worker, over links with latency.

Only the network and the clock are simulated. The coordinator's replies leave one after another over its own link; every
message takes the latency of its worker. Workers' trainers are reduced to what the coordinator sees of them: a newcomer
has the state after a step in an active view, and all members of a view report within a moment that it broke.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

from gossamer.base.peer_ops import (
    WORKER,
    Answer,
    Arrived,
    Ask,
    Elapsed,
    Peer,
    PeerEvent,
    PeerLeft,
    PeerScript,
    Reply,
)
from gossamer.base.rng import address
from gossamer.comm.membership.coordinator import Coordinator
from gossamer.comm.membership.journal import MemoryJournal
from gossamer.comm.membership.member import MemberScripts
from gossamer.comm.membership.messages import ATTACHED, HERE, HERE_AGAIN, READY, News, WorkerReport
from gossamer.comm.membership.next_view import CoordinatorOptions, ViewPolicy
from gossamer.comm.membership.view import View
from gossamer.comm.rpc_protocol.messages import encode_answer, encode_ask

FINGERPRINT = json.dumps({"torch": "2.13.0", "recipe": "LocalSGD(period=100) + Groups(size=8)"})
SERVER = "10.0.0.1:29700"
LINK_BITS_PER_SECOND = 1e9  # of the coordinator
NOTICED_SECONDS = (0.05, 0.15)  # until a member sees that its view broke: errors travel from member to member
STEP_SECONDS = 0.5  # until a newcomer has the state


@lru_cache(maxsize=4096)
def answer_bytes(answer: Answer) -> int:
    return encode_answer(answer, 10_000).frame_bytes


@contextmanager
def shared_parsing() -> Iterator[None]:
    """Parse each text once, although all members receive it. Its digest is compared by the first of them."""
    read_view, read = News.read_view, dict[tuple[int, int], tuple[News, View | None, View]]()

    def read_once(news: News, base: View | None = None) -> View:
        key = id(news), id(base)
        if key not in read:
            read[key] = news, base, read_view(news, base)
            while len(read) > 64:
                del read[next(iter(read))]
        return read[key][-1]

    with patch.object(News, "of", lru_cache(maxsize=4096)(News.of)), patch.object(News, "read_view", read_once):
        yield


@dataclass(eq=False)
class Worker:
    """One process: its scripts, and what it has seen."""

    number: int
    latency_seconds: float
    scripts: MemberScripts = field(init=False)
    asked: dict[int, tuple[Ask, PeerScript]] = field(default_factory=dict)  # unanswered requests by token
    is_alive: bool = True
    views: list[int] = field(default_factory=list)  # numbers of the views that it has received

    @property
    def peer(self) -> Peer:
        return Peer(WORKER, self.number)

    @property
    def is_active(self) -> bool:
        """Whether it is a member of a view that has not ended, as far as it knows."""
        view = self.scripts.view
        return self.is_alive and not self.scripts.out and view is not None and self.scripts.over < view.number


def rounds_completed(
    agreements: Sequence[tuple[float, float]], began: float, ended: float, local_seconds: float, sync_seconds: float
) -> int:
    """Number of rounds that end within a time: local steps, which no view interrupts, then a synchronization, which
    needs all members and begins again after each change."""
    done, ready = 0, began + local_seconds
    for begin, end in agreements:
        while (synchronized := max(begin, ready) + sync_seconds) <= min(end, ended):
            done, ready = done + 1, synchronized + local_seconds
    return done


class ManyMembers:
    """A run with `count` workers at first.

    Args:
        count: Workers for which the first view waits.
        seed: Seed of latencies, losses and arrivals.
        most: Maximum number of members; None: twice `count`.
        lock_step: Whether all members report a loss, because their step needs all; otherwise servers have the state.
        policy: Decides about views.
        coordinator: Answers the workers.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        most: int | None = None,
        lock_step: bool = True,
        policy: type[ViewPolicy] = ViewPolicy,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        self.random, self.now, self.notes = Random(address("many members", seed)), 0.0, list[str]()
        servers = () if lock_step else (SERVER,)
        options = CoordinatorOptions(least=1, most=most or 2 * count, initial=count, servers=servers)
        self.rule = policy(options, MemoryJournal(), self.notes.append, self.random.randbytes)
        self.coordinator = coordinator(self.rule)
        self.workers: dict[int, Worker] = {}
        self.sent, self.received, self.bytes = Counter[str](), Counter[str](), Counter[str]()  # of the coordinator
        self.events, self.cpu_seconds = 0, 0.0  # of the coordinator
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = self._tokens = 0
        self._link_free_at = 0.0
        self._due = inf
        self._askers: dict[int, Worker] = {}  # by token
        self._lock_step = lock_step
        self.active_seconds = 0.0  # in which the newest view was active
        self.agreements = list[tuple[float, float]]()  # begin and end of each time in which all members agreed
        self._agreed_since: float | None = None
        self._lost_in = 0  # newest view in which a worker was lost
        self.holders = Counter[int]()  # members that have received a view, by its number
        for _ in range(count):
            self.after(self.random.uniform(0, 1.0), self._arrive_first)

    # -- what happens --------------------------------------------------------------------------------------------------

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, act))

    def arrive(self, newcomer: bool = True) -> Worker:
        """Start a worker."""
        number = self.random.getrandbits(63)
        worker = self.workers[number] = Worker(number, self.random.uniform(0.005, 0.05))
        host = ".".join(["10", *(str(self.random.randrange(256)) for _ in range(3))])
        report = WorkerReport(number=number, host=host, port=self.random.randrange(2**15, 2**16), place=-1)
        worker.scripts = MemberScripts(report, on_change=lambda: self._on_change(worker))
        self._start(worker, self._joining(worker, newcomer))
        return worker

    def _arrive_first(self) -> None:
        self.arrive(newcomer=False)

    def _arrive_later(self) -> None:
        self.arrive()

    def lose(self, worker: Worker) -> None:
        """Kill a worker: its connection closes, and the members of its view get errors."""
        worker.is_alive = False
        view = worker.scripts.view
        self._lost_in = 0 if self.rule.view is None else self.rule.view.number
        self.after(worker.latency_seconds, lambda: self._react(PeerLeft(moment=self.now, peer=worker.peer)))
        if view is None or not self._lock_step:
            return
        for number in view.numbers:
            other = self.workers[number]
            if other.is_active:
                self.after(self.random.uniform(*NOTICED_SECONDS), partial(self._broke, other, view, worker.number))

    def churn(self, per_minute: float, seconds: float) -> None:
        """Lose and start workers at random moments, at a rate relative to the number of members."""
        rate, at = per_minute * self.rule.initial / 60, 0.0
        while (at := at + self.random.expovariate(rate)) < seconds:
            self.after(at, self._lose_any)
            self.after(self.random.uniform(0, seconds), self._arrive_later)

    def _lose_any(self) -> None:
        alive = [each for each in self.members if each.is_alive]
        if alive:
            self.lose(self.random.choice(alive))

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False, seconds: float = inf) -> float:
        """Run until a condition holds or some virtual seconds are over. Returns the virtual seconds that it took."""
        began = self.now
        while not until():
            at = self._queue[0][0] if self._queue else inf
            moment = min(at, self._due, began + seconds)
            if self.rule.view is not None and not self.rule.is_over:
                self.active_seconds += max(0.0, moment - self.now)
            if min(at, self._due) > began + seconds:
                self.now = began + seconds
                break
            if self._due < at:
                self.now = max(self.now, self._due)
                self._react(Elapsed(moment=self.now))
            else:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            self._look()
        return self.now - began

    def agreements_until_now(self) -> list[tuple[float, float]]:
        """Times in which all members agreed; the last one may continue."""
        open_ = [] if self._agreed_since is None else [(self._agreed_since, self.now)]
        return [*self.agreements, *open_]

    def _look(self) -> None:
        """Record the end of an agreement."""
        if not self.agreed and self._agreed_since is not None:
            self.agreements.append((self._agreed_since, self.now))
            self._agreed_since = None
        elif self.agreed and self._agreed_since is None:
            self._agreed_since = self.now

    @property
    def members(self) -> list[Worker]:
        """Members of the coordinator's newest view."""
        return [] if self.rule.view is None else [self.workers[each.number] for each in self.rule.view.members]

    @property
    def agreed(self) -> bool:
        """Whether all living members of the newest view have received it, and nothing is about to change."""
        view = self.rule.view
        return (
            view is not None
            and not self.rule.is_over
            and self._lost_in < view.number
            and self.holders[view.number] == view.world
        )

    @property
    def messages(self) -> int:
        return self.sent.total() + self.received.total()

    def _react(self, event: PeerEvent) -> None:
        self.events += 1
        began = time.process_time()
        replies = self.coordinator.react(event)
        self._due = self.rule.due
        self.cpu_seconds += time.process_time() - began
        for reply in replies:
            self._reply(reply)

    def _reply(self, reply: Reply) -> None:
        worker = self._askers.pop(reply.token)
        op, script = worker.asked[reply.token]
        kind, nbytes = op.key.partition("/")[0], answer_bytes(reply.answer)
        self.sent[kind] += 1
        self.bytes[f"sent {kind}"] += nbytes
        self._link_free_at = max(self._link_free_at, self.now) + 8 * nbytes / LINK_BITS_PER_SECOND
        self.after(
            self._link_free_at - self.now + worker.latency_seconds, lambda: self._answered(worker, reply, script)
        )

    # -- workers -------------------------------------------------------------------------------------------------------

    def _joining(self, worker: Worker, newcomer: bool) -> PeerScript:
        yield from worker.scripts.send_report(HERE)
        self._start(worker, worker.scripts.follow())
        if newcomer:
            worker.scripts.learn(ready=True, fingerprint=FINGERPRINT)
            yield from worker.scripts.send_report(READY)

    def _on_change(self, worker: Worker) -> None:
        view = worker.scripts.view
        if view is None or worker.scripts.out or (worker.views and worker.views[-1] >= view.number):
            return
        worker.views.append(view.number)
        self.holders[view.number] += 1
        if view.number == 1:
            worker.scripts.learn(fingerprint=FINGERPRINT)
            self._start(worker, worker.scripts.send_report(ATTACHED))
        elif worker.number in view.newcomers:
            self.after(STEP_SECONDS, lambda: self._caught_up(worker, view))

    def _caught_up(self, worker: Worker, view: View) -> None:
        if worker.is_active and worker.scripts.view is view:
            worker.scripts.learn(has_state=True)
            self._start(worker, worker.scripts.send_report(HERE_AGAIN))

    def _broke(self, worker: Worker, view: View, suspect: int) -> None:
        if worker.is_active and worker.scripts.view is not None and worker.scripts.view.number == view.number:
            self._start(worker, worker.scripts.report_broken(view.number, [suspect], "connection reset by peer"))

    def _start(self, worker: Worker, script: PeerScript) -> None:
        self._go_on(worker, script, None)

    def _go_on(self, worker: Worker, script: PeerScript, heard: Any) -> None:
        try:
            op: Any = script.send(heard)
        except StopIteration:
            return
        self._tokens += 1
        token = self._tokens
        worker.asked[token] = op, script
        self._askers[token] = worker
        self.after(worker.latency_seconds, lambda: self._arrived(worker, token, op))

    def _arrived(self, worker: Worker, token: int, op: Ask) -> None:
        if not worker.is_alive:
            return
        kind = op.key.partition("/")[0]
        self.received[kind] += 1
        self.bytes[f"received {kind}"] += encode_ask(op, 10_000).frame_bytes
        self._react(Arrived(moment=self.now, token=token, sender=worker.peer, op=op))

    def _answered(self, worker: Worker, reply: Reply, script: PeerScript) -> None:
        del worker.asked[reply.token]
        if worker.is_alive:
            self._go_on(worker, script, reply.answer)
