"""Coordinator of an elastic run: processes worker reports, applies the view policy, and answers pending polls.

Only the coordinator creates views. It is not on the data path: while the membership is stable, training does not
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from gossamer.base.host_port import Address
from gossamer.base.json_text import read_json
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
)
from gossamer.base.units import counted
from gossamer.comm.membership.known_worker import ReportedWorker, read_fingerprint
from gossamer.comm.membership.messages import (
    ATTACHED,
    BROKEN,
    HERE,
    HERE_AGAIN,
    IDENTITY,
    LEAVES,
    NEWS,
    OUT_VERSION,
    READY,
    RELAY_SERVER,
    RELAYS,
    RESIZE,
    STATUS,
    BrokenReport,
    News,
    Standing,
    WorkerReport,
    version_of,
)
from gossamer.comm.membership.next_view import NO_SECRET, ViewPolicy
from gossamer.comm.membership.view import MOST_RELAYS, RelayAddress, View
from gossamer.errors import MalformedError

AGAIN = News(again=True).text()
MOST_DIGITS = 19  # of a worker's number
UNSEALED = (
    "this run has no relays, so its workers do not seal their connections: start its first launcher with --relay, too"
)
OTHER_RUN = (
    "this worker belongs to run {theirs:.8}, but the coordinator serves run {ours:.8}: the worker's run has ended, or "
    "its first launcher was restarted in another folder and did not find the journal"
)


class Coordinator:
    """Maps events to replies. It has no socket, and its only clock is the time stamp of each event.

    Args:
        rule: decides about views; has the settings of the run.
        address_of: the address from which a peer is connected.
    """

    def __init__(self, rule: ViewPolicy, address_of: Callable[[Peer], Address | None] = lambda peer: None) -> None:
        self.rule, self._address_of = rule, address_of
        self._relay_servers: dict[Peer, tuple[RelayAddress, ...]] = {}
        self._replies: list[Reply] = []
        self._answered: tuple[str, View | None, bool] = "", None, False  # state at the last answers to all workers
        self._texts_of: View | None = None  # the view of which `_texts` has the news, by number of the base
        self._texts_relays: tuple[RelayAddress, ...] = ()
        self._texts: dict[int, str] = {}

    def react(self, event: PeerEvent) -> list[Reply]:
        """Return the replies that this event triggers, including replies to earlier pending requests."""
        self.rule.look_at_clock(event.moment)
        match event:
            case PeerLeft(peer=peer):
                self._relay_servers.pop(peer, None)
                for each in self.rule.workers.of_peer(peer):
                    self.rule.connection_closed(each)
            case PeerJoined(peer=peer):
                for each in self.rule.workers.of_peer(peer):
                    self._record_contact(each, peer)
            case Arrived(token=token, sender=sender, op=op):
                try:
                    self._received(token, sender, op)
                except MalformedError as error:
                    self._refuse(token, op, str(error))
        return self._go_on()

    def resize(self, most: int, now: float) -> tuple[str, list[Reply]]:
        """Set the maximum number of members. Returns a description of the effect, and replies."""
        self.rule.look_at_clock(now)
        return self.rule.resize(most), self._go_on()

    def gone(self, number: int, now: float) -> list[Reply]:
        """Record that the process of this worker has ended."""
        self.rule.look_at_clock(now)
        if number in self.rule.workers:
            self.rule.workers.end(self.rule.workers[number])
        return self._go_on()

    def expect(self, workers: int, now: float) -> list[Reply]:
        """Lower the size of the first view to `workers`, because some workers died before they connected."""
        self.rule.look_at_clock(now)
        self.rule.initial = max(self.rule.least, min(self.rule.initial, workers))
        return self._go_on()

    def end(self, why: str, now: float) -> list[Reply]:
        """End the run, unless it has ended already."""
        self.rule.look_at_clock(now)
        if not self.rule.ended:
            self.rule.end(why)
        return self._go_on()

    def number_at(self, place: int) -> int | None:
        """Return the number of the newest worker that reported this launch slot, or None."""
        found = [each.number for each in self.rule.workers.values() if each.report.place == place]
        return found[-1] if found else None

    def _go_on(self) -> list[Reply]:
        self.rule.go_on()
        self._answer_pending()
        replies, self._replies = self._replies, []
        return replies

    # -- requests ------------------------------------------------------------------------------------------------------

    def _received(self, token: int, sender: Peer, op: Ask) -> None:
        match op:
            case Pull(key=key) if key == IDENTITY:
                self._reply(token, Pulled(version=0, about=self.rule.run))
            case Pull(key=key, known=known):
                what, *numbers = key.split("/")
                if what not in (NEWS, STATUS) or len(numbers) not in (1, 2) or not all(map(_is_number, numbers)):
                    raise MalformedError(f"a coordinator does not serve the key {key[:40]!r}")
                number, held = int(numbers[0]), int(numbers[-1]) if len(numbers) > 1 else 0
                if what == STATUS:
                    self._reply(token, Pulled(version=0, about=self.status(number)))
                else:
                    self._poll(token, sender, number, known, held)
            case Push(key=key, about=about) if key in (HERE, READY, ATTACHED, HERE_AGAIN):
                self._reported(token, sender, key, WorkerReport.of(about))
            case Push(key=key, stamp=stamp, about=about) if key == BROKEN:
                self.rule.broke(stamp.worker, BrokenReport.of(about))
                self._reply(token, Receipt(version=0))
            case Push(key=key, stamp=stamp) if key == LEAVES:
                self._reply(token, Receipt(version=0))
                if stamp.worker in self.rule.workers:
                    self.rule.leaves(self.rule.workers[stamp.worker], finished=bool(stamp.step))
            case Push(key=key, about=about) if key == RELAYS and sender.kind == RELAY_SERVER:
                self._relay_arrived(token, sender, about)
            case Push(key=key, stamp=stamp) if key == RESIZE:
                self._reply(token, Receipt(version=0, about=self.rule.resize(stamp.step)))
            case _:
                raise MalformedError(f"a coordinator does not accept {op.key[:40]!r}")

    def _poll(self, token: int, sender: Peer, number: int, known: int, held: int) -> None:
        worker = self.rule.workers.get(number)
        if worker is None or worker.peer != sender:
            out = self.rule.ended or self.rule.outs.get(number)
            reply = Pulled(version=OUT_VERSION, about=News(out=out).text()) if out else self._again(known)
            self._reply(token, reply)
            return
        if known < OUT_VERSION:
            self._check_newer(known // 2)
        self._record_contact(worker, sender)
        worker.polls.append((token, known, held))
        self.rule.workers.changed[number] = worker
        if known > 0 and known % 2:
            worker.closed_view = max(worker.closed_view, known // 2)
        if self.rule.view is not None and self.rule.view.holds(number):
            holds = version_of(self.rule.view.number, False)
            if known > holds or (known < holds and self.rule.view.secret == NO_SECRET):
                # The worker received this version before the coordinator restarted, or needs the lost secret
                self.rule.declare_over()

    def _reported(self, token: int, sender: Peer, key: str, report: WorkerReport) -> None:
        if report.run != self.rule.run and (report.run or report.view):
            about = Standing(refused=OTHER_RUN.format(theirs=report.run, ours=self.rule.run), run=self.rule.run)
            self._reply(token, Receipt(version=-1, about=about.text()))
            return
        self._check_newer(report.view)
        worker = self.rule.learn(report, sender)
        self.rule.workers.changed[report.number] = worker
        self._record_contact(worker, sender)
        if self.rule.view is not None and report.view and not self.rule.view.holds(report.number):
            self.rule.outs.setdefault(
                report.number, f"view {self.rule.view.number} was created while this worker was unreachable"
            )
        if key == ATTACHED:
            read_fingerprint(report.fingerprint)
            self.rule.attached(report.number, report.fingerprint)
        if key == READY:
            worker.readies.append(token)
        else:
            self._reply(token, Receipt(version=0, about=self._standing(worker).text()))

    def _relay_arrived(self, token: int, sender: Peer, about: str) -> None:
        """Name a relay to the members of later views, until its connection is closed."""
        if not self.rule.options.relays:
            self._reply(token, Receipt(version=-1, about=UNSEALED))
            return
        try:
            addresses = tuple(RelayAddress.of([*each, sender.number]) for each in read_json(about))
        except (TypeError, ValueError):
            raise MalformedError("a relay's addresses are invalid") from None
        self._relay_servers[sender] = addresses

    @property
    def relays(self) -> tuple[RelayAddress, ...]:
        """Relays other than this process."""
        return tuple(each for addresses in [*self._relay_servers.values()] for each in addresses)[:MOST_RELAYS]

    def _record_contact(self, worker: ReportedWorker, peer: Peer) -> None:
        worker.seen_at = self._address_of(peer) or worker.seen_at
        self.rule.record_contact(worker, peer)

    def _check_newer(self, view: int) -> None:
        """End the run if a worker was in a view newer than the journal's last one: the journal has lost its end."""
        own = 0 if self.rule.view is None else self.rule.view.number
        if view > own and not self.rule.ended:
            self.rule.end(
                f"a worker of this run was in view {view}, but the coordinator's journal ends with view {own}. The "
                "newer views were never written, so the members are unknown. Restart from the last checkpoint"
            )

    # -- replies -------------------------------------------------------------------------------------------------------

    def _standing(self, worker: ReportedWorker) -> Standing:
        formed = self.rule.view is not None and not self.rule.view.holds(worker.number)
        size = self.rule.view.world if self.rule.view else 0
        rule = self.rule
        return Standing(
            formed=formed,
            size=size,
            began=rule.began,
            least=rule.least,
            most=rule.most,
            refused=worker.refused,
            relay=rule.options.relays,
            seal=rule.options.sealed,
            run=rule.run,
            servers=",".join(rule.options.servers),
        )

    def status(self, number: int = 0) -> str:
        """Describe, for the user, why a worker is waiting; 0 for the run itself."""
        worker = self.rule.workers.get(number)
        if self.rule.view is None:
            return f"{self.rule.workers.connected} of {self.rule.initial} workers are connected"
        if worker is not None and not self.rule.view.holds(number):
            if self.rule.view.world >= self.rule.most and not self.rule.why_not_in(worker):
                return f"all {self.rule.most} places are taken. Add one with `gossamer resize {self.rule.most + 1}`"
            return self.rule.why_not_in(worker) or "the current members are closing their view to admit this worker"
        view = self.rule.view
        if self.rule.is_over:
            alive = sum(self.rule.workers[each.number].closed_view >= view.number for each in view.members)
            return f"{alive} of {view.world} workers have closed view {view.number}; {self.rule.least} are needed"
        return f"view {view.number} is active, with {counted(view.world, 'worker')}"

    def _refuse(self, token: int, op: Ask, why: str) -> None:
        about = Standing(refused=why).text()
        self._reply(
            token, Receipt(version=-1, about=about) if isinstance(op, Push) else Pulled(version=-1, about=about)
        )

    def _answer_pending(self) -> None:
        """Answer every pending request that has a new result."""
        for worker in self.rule.forgotten:
            for token in worker.readies:
                self._reply(token, Receipt(version=0, about=self._standing(worker).text()))
            out, news = self._news(worker)
            for token, known, _ in worker.polls:
                reply = Pulled(version=out, about=news) if out == OUT_VERSION else self._again(known)
                self._reply(token, reply)
        self.rule.forgotten.clear()
        last, self._answered = self._answered, (self.rule.ended, self.rule.view, self.rule.is_over)
        is_same = all(one is other for one, other in zip(last, self._answered, strict=True))
        concerned = self.rule.workers.changed if is_same else self.rule.workers
        for worker in concerned.values():
            if worker.readies and (worker.is_compared or self.rule.ended):
                for token in worker.readies:
                    self._reply(token, Receipt(version=0, about=self._standing(worker).text()))
                worker.readies.clear()
            if not worker.polls:
                continue
            version = self._news(worker, -1)[0]
            for token, known, held in worker.polls:
                if known < version:
                    self._reply(token, Pulled(version=version, about=self._news(worker, held)[1]))
            worker.polls = [each for each in worker.polls if each[1] >= version]
        self.rule.workers.changed = {}

    @staticmethod
    def _again(known: int) -> Pulled:
        return Pulled(version=known, about=AGAIN)

    def _news(self, worker: ReportedWorker, held: int = 0) -> tuple[int, str]:
        """Return the version and the text of a worker's news. held: number of its newest view; -1: without a text."""
        out, view = self.rule.ended or self.rule.outs.get(worker.number) or worker.refused, self.rule.view
        if out:
            return OUT_VERSION, "" if held < 0 else News(out=out).text()
        if view is None or not view.holds(worker.number):
            return -1, ""
        if self.rule.is_over:
            return version_of(view.number, True), _over_text(view.number)
        if view.secret == NO_SECRET:
            return -1, ""  # members that train in this view already have its secret
        return version_of(view.number, False), "" if held < 0 else self._view_news(view, held)

    def _view_news(self, view: View, held: int) -> str:
        """News of a view: as a difference for a worker that has the view before it. Each text is built once."""
        base, relays = self.rule.last_view, self.relays
        if self._texts_of is not view or self._texts_relays != relays:
            self._texts_of, self._texts_relays, self._texts = view, relays, {}
        key = held if base is not None and held == base.number else 0
        if key not in self._texts:
            current = replace(view, relays=relays)
            change = current.change_text(base) if key and base is not None else ""
            self._texts[key] = (News(change=change) if change else News(view=current.text())).text()
        return self._texts[key]

    def _reply(self, token: int, answer: Answer) -> None:
        self._replies.append(Reply(token=token, answer=answer))


@lru_cache(maxsize=4)
def _over_text(view: int) -> str:
    return News(over=view).text()


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MOST_DIGITS


def coordinate(coordinator: Coordinator, react: Callable[[PeerEvent], list[Reply]] | None = None) -> PeerScript:
    """Process events forever. react: the coordinator's method, or one that holds a lock around it."""
    react = react or coordinator.react
    while True:
        event = yield Await(until=coordinator.rule.due)
        yield from react(event)
