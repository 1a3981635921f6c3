"""A coordinator that hears what a test says, at the moments that it names, and what it answers to whom."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from gossamer.base.peer_ops import (
    WORKER,
    Arrived,
    Elapsed,
    Peer,
    PeerEvent,
    PeerLeft,
    Pull,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.comm.membership.coordinator import Coordinator
from gossamer.comm.membership.journal import MemoryJournal
from gossamer.comm.membership.messages import (
    ATTACHED,
    BROKEN,
    COORDINATOR,
    HERE,
    HERE_AGAIN,
    LEAVES,
    NEWS,
    READY,
    STATUS,
    BrokenReport,
    News,
    Standing,
    WorkerReport,
)
from gossamer.comm.membership.next_view import CoordinatorOptions, ViewPolicy
from gossamer.comm.membership.view import View

LIKE = json.dumps({"torch": "2.13.0"})


class Desk:
    """Workers are numbers; each follows the news unless a test says that it is silent."""

    def __init__(
        self, journal: MemoryJournal | None = None, rule: type[ViewPolicy] = ViewPolicy, **options: Any
    ) -> None:
        self.now, self.notes = 0.0, list[str]()
        self.journal = journal or MemoryJournal()
        given = {"least": 1, "most": 8, "initial": 2, "dead_after_seconds": 5.0, "patience_seconds": 60.0} | options
        self.rule = rule(CoordinatorOptions(**given), self.journal, self.notes.append)
        self.coordinator = Coordinator(self.rule)
        self.known: dict[int, int] = {}  # by worker: the version of the news that it heard last
        self.news: dict[int, News] = {}
        self.silent: set[int] = set()
        self.places: dict[int, int] = {}
        self.runs: dict[int, str] = {}  # by worker: the identity of the run that it was told
        self._tokens = count()
        self._asks: dict[int, tuple[int, Push | Pull]] = {}
        self.answers: dict[int, list[Any]] = {}

    # -- what happens --------------------------------------------------------------------------------------------------

    def hear(self, event: PeerEvent) -> None:
        self._hand_out(self.coordinator.react(event))

    def _hand_out(self, replies: list[Reply]) -> None:
        for reply in replies:
            worker, op = self._asks.pop(reply.token, (0, None))
            if op is None:
                continue  # its connection has closed
            if isinstance(op, Pull) and op.key.startswith(NEWS):
                self._heard_news(worker, reply.answer.version, News.of(reply.answer.about))
            else:
                self.answers.setdefault(worker, []).append(reply.answer)
                self._compare_runs(worker, reply.answer)
        for worker in sorted(self.known.keys() - self.silent):
            waits = any(asker == worker and isinstance(op, Pull) for asker, op in self._asks.values())
            if not waits and not self.news[worker].out:
                self.poll(worker)

    def _compare_runs(self, worker: int, answer: Any) -> None:
        """As MemberScripts: a worker that another run's coordinator answers is out."""
        standing = Standing.of(answer.about) if isinstance(answer, Receipt) and "run" in answer.about else Standing()
        if standing.run and self.runs.setdefault(worker, standing.run) != standing.run:
            self.news[worker] = News(out=standing.refused)

    def gone(self, *workers: int) -> None:
        """A launcher sees their processes end."""
        for worker in workers:
            self.silent.add(worker)
            self._hand_out(self.coordinator.gone(worker, self.now))

    def resize(self, most: int) -> str:
        said, replies = self.coordinator.resize(most, self.now)
        self._hand_out(replies)
        return said

    def _heard_news(self, worker: int, version: int, news: News) -> None:
        if news.again:
            self.say(worker, HERE_AGAIN, view=max(self.known[worker], 0) // 2)
        else:
            self.known[worker], self.news[worker] = version, news

    def ask(self, worker: int, op: Push | Pull) -> None:
        token = next(self._tokens)
        self._asks[token] = worker, op
        self.hear(Arrived(moment=self.now, token=token, sender=Peer(WORKER, worker), op=op))

    def say(self, worker: int, key: str, **facts: Any) -> None:
        """facts: of the worker's report."""
        facts.setdefault("run", self.runs.get(worker, ""))
        self.places[worker] = facts.pop("place", self.places.get(worker, worker))
        report = WorkerReport(number=worker, host="h", port=worker, place=self.places[worker], **facts)
        self.ask(worker, Push(to=COORDINATOR, key=key, stamp=Stamp(worker, 0), about=report.text()))

    def poll(self, worker: int) -> None:
        self.ask(worker, Pull(of=COORDINATOR, key=f"{NEWS}/{worker}", known=self.known[worker]))

    def here(self, *workers: int, **facts: Any) -> None:
        for worker in workers:
            self.say(worker, HERE, **facts)
            self.known.setdefault(worker, -1)
            self.news.setdefault(worker, News())
            self.poll(worker)

    def begin(self, *workers: int) -> View:
        self.here(*workers)
        self.say(workers[0], ATTACHED, fingerprint=LIKE, view=1)
        return self.view

    def ready(self, *workers: int, fingerprint: str = LIKE) -> None:
        for worker in workers:
            self.say(worker, READY, ready=True, fingerprint=fingerprint)

    def broken(self, worker: int, *suspects: int, went_on: bool = False, view: int = 0) -> None:
        report = BrokenReport(view=view or self.view.number, suspects=list(suspects), why="?", went_on=went_on)
        self.ask(worker, Push(to=COORDINATOR, key=BROKEN, stamp=Stamp(worker, 0), about=report.text()))

    def leave(self, worker: int, finished: bool = False) -> None:
        self.ask(worker, Push(to=COORDINATOR, key=LEAVES, stamp=Stamp(worker, int(finished))))

    def caught_up(self, worker: int) -> None:
        self.say(worker, HERE_AGAIN, has_state=True, ready=True, fingerprint=LIKE)

    def lose(self, *workers: int) -> None:
        """Their connections close."""
        for worker in workers:
            self.silent.add(worker)
            self._asks = {token: ask for token, ask in self._asks.items() if ask[0] != worker}
            self.hear(PeerLeft(moment=self.now, peer=Peer(WORKER, worker)))

    def back(self, worker: int) -> None:
        self.silent.discard(worker)
        self.poll(worker)

    def wait(self, seconds: float) -> None:
        """Let time go by, and the coordinator look whenever it wants to."""
        until = self.now + seconds
        while self.rule.due < until:
            self.now = self.rule.due
            self.hear(Elapsed(moment=self.now))
        self.now = until
        self.hear(Elapsed(moment=self.now))

    # -- what is so ----------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        assert self.rule.view is not None
        return self.rule.view

    @property
    def members(self) -> list[int]:
        return [each.number for each in self.view.members]

    def standing(self, worker: int) -> Standing:
        answer = self.answers[worker][-1]
        assert isinstance(answer, Receipt)
        return Standing.of(answer.about)

    def status(self, worker: int) -> str:
        self.ask(worker, Pull(of=COORDINATOR, key=f"{STATUS}/{worker}"))
        return str(self.answers[worker][-1].about)
