"""Next view: decides when a view ends, who is in the next view, and when the run ends.

A change (lost worker, leaving worker, ready newcomer, resize, report of a broken view) first ends the current view.
The next view is created once each member has either closed the old view, which proves that it is alive, or is lost.
It consists of the live members, in their order, followed by the ready newcomers. At least one of them must have the
parameters; otherwise the run ends.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from gossamer.base.peer_ops import Peer
from gossamer.comm.membership.journal import ViewJournal, view_entry
from gossamer.comm.membership.known_worker import ALIVE, LOST, UNDECIDED, KnownWorkers, ReportedWorker, difference
from gossamer.comm.membership.messages import ALL_LEFT, RESIZED, BrokenReport, WorkerReport
from gossamer.comm.membership.view import MOST_MEMBERS, SECRET_BYTES, View
from gossamer.errors import MalformedError, require

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
LOSS_FORGOTTEN_SECONDS = 300.0  # after this time without a loss, the count restarts


@dataclass
class LossHistory:
    """Losses per launch slot. A single loss causes no back-off. It is 1 s after the second loss, 2 s after the third,
    and at most 30 s."""

    _losses: dict[str, tuple[int, float]] = field(default_factory=dict)  # consecutive losses, time of the last one
    _closed: set[str] = field(default_factory=set)  # slots with a back-off that may not have ended

    def lost(self, place: str, now: float) -> None:
        count, last = self._losses.get(place, (0, now))
        self._losses[place] = (1 if now - last > LOSS_FORGOTTEN_SECONDS else count + 1), now
        if self.opens_at(place) > now:
            self._closed.add(place)

    def next_opening(self, now: float) -> float:
        """Return the time at which the next back-off ends; inf for none."""
        self._closed = {place for place in self._closed if self.opens_at(place) > now}
        return min(map(self.opens_at, self._closed), default=inf)

    def count(self, place: str) -> int:
        return self._losses.get(place, (0, 0.0))[0]

    def opens_at(self, place: str) -> float:
        """Return the time from which a worker of this slot may be admitted; in the past if there was no loss."""
        count, last = self._losses.get(place, (0, 0.0))
        if count < 2:
            return float("-inf")
        return last + min(FIRST_SECONDS * 2.0 ** min(count - 2, 10), LONGEST_SECONDS)


TRIES = 3  # consecutive broken views before a member is evicted
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
VIEW_HELD_SECONDS = 600.0  # a view that lasted this long counts as working, even without a report

Accusation = tuple[int, int]  # (accuser, accused) numbers


def least_connected(members: Sequence[int], accusations: Iterable[Accusation]) -> int | None:
    """Return the member with the fewest connections; among several, the one that joined last.

    Two members count as connected unless one accuses the other, because it is unknown which of the two is right.

    Args:
        members: Numbers of the members, in the order in which they joined.
        accusations: Pairs (accuser, accused).

    Returns:
        The number of a member, or None if no member accuses another.
    """
    joined = {member: place for place, member in enumerate(members)}
    pairs = {frozenset(each) for each in accusations if each[0] != each[1] and all(one in joined for one in each)}
    if not pairs:
        return None
    apart = Counter(member for pair in pairs for member in pair)
    return max(members, key=lambda member: (apart[member], joined[member]))


@dataclass
class AccusationRecord:
    """Accusations in consecutive views that broke without a loss to explain it."""

    _views: list[frozenset[Accusation]] = field(default_factory=list)  # of the last TRIES views
    _count: int = 0  # all consecutive broken views

    def broke(self, accusations: Set[Accusation], *, explained: bool, went_on: bool, seconds: float) -> None:
        """Record a broken view.

        Args:
            accusations: Of this view.
            explained: Whether a member was lost.
            went_on: Whether a transaction was completed in it.
            seconds: How long the view lasted.
        """
        if explained or went_on or seconds > VIEW_HELD_SECONDS:
            self.clear()
        if not explained:
            self._views = [*self._views, frozenset(accusations)][-TRIES:]
            self._count += 1

    def pause_seconds(self) -> float:
        """Pause before the next view, so that views that break at once do not follow each other without delay."""
        doublings = min(self._count - 2, 10)
        return 0.0 if doublings < 0 else min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)

    def blamed(self, members: Sequence[int]) -> int | None:
        """Return the member to evict, or None. Every one of the last TRIES views must contain an accusation."""
        if len(self._views) < TRIES or not all(self._views):
            return None
        return least_connected(members, {each for view in self._views for each in view})

    def clear(self) -> None:
        self._views, self._count = [], 0


NOTICE_SECONDS = 10.0  # between messages about a waiting run
SOON_SECONDS = 1.0  # before the first message: at the end of a run, members leave one after another
NO_SECRET = bytes(SECRET_BYTES)  # of a view that was read from a journal
FREE_MEMBERS, SECONDS_A_MEMBER = 64, 5e-4  # a view is followed by the next one after this time for each further member
NEWCOMERS_PACES = 4.0  # and after this many times as long, if there are newcomers only
MOST_OUTS = 2**14  # reasons that are kept for evicted workers; an older one receives a general reason
MOST_NAMED = 8  # workers in a message to the user
RUN_BYTES = 16  # of a run's identity


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """Settings of an elastic run that its coordinator applies.

    Args:
        least: Minimum number of members of a view.
        most: Maximum number of members of a view, until a resize.
        initial: Number of workers for which the first view waits.
        dead_after_seconds: A member that is silent for this long is lost.
        reconnect_seconds: Time that a member has to reconnect after its connection broke.
        patience_seconds: After this time since the first worker connected, the first view begins with `least` workers.
        end_after_seconds: The run ends after this time without a reachable member that has the parameters.
        relays: Whether the coordinator relays connections between workers that cannot connect to each other.
        seals: Whether workers seal their connections with keys of their own. Relayed connections are always sealed.
        servers: Addresses of the run's parameter servers, as HOST:PORT. With servers, every member counts as one that
            has the parameters, and newcomers may come after the loss of all members.

    Raises:
        ValueError: unless 1 <= least <= initial <= most.
    """

    least: int
    most: int
    initial: int
    dead_after_seconds: float = 5.0
    reconnect_seconds: float = 0.1
    patience_seconds: float = 300.0
    end_after_seconds: float = 300.0
    relays: bool = False
    seals: bool = False
    servers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            1 <= self.least <= self.initial <= self.most,
            f"worker counts must satisfy least <= initial <= most, got {self.least}, {self.initial} and {self.most}. "
            "Example: --workers 2:8",
        )

    @property
    def sealed(self) -> bool:
        """Whether workers seal their connections."""
        return self.seals or self.relays


class ViewPolicy:
    """The newest view, and the coordinator's knowledge of each worker.

    It has no socket, does not interpret messages, and its only clock is `now`.

    Args:
        options: Settings of the run.
        journal: Storage for decisions.
        note: Called with messages for the user.
        draw: Source of random bytes.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        journal: ViewJournal,
        note: Callable[[str], None],
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.options, self._journal, self._note, self._draw = options, journal, note, draw
        self.least, self.initial = options.least, options.initial
        self._reconnect_seconds = min(options.reconnect_seconds, options.dead_after_seconds)
        kept = journal.load()
        self.run = kept.run or draw(RUN_BYTES).hex()
        if not kept.run:
            journal.append({"run": self.run})
        self.most, self.ended, self.fingerprint = kept.most or options.most, kept.ended, kept.fingerprint
        self.began = kept.began
        self.resizes = 0  # number of resize requests
        self.finishing = kept.finishing
        self.view: View | None = None
        self.last_view: View | None = None  # the one before, if this process has made it or read it from the journal
        self.is_over = False
        self.workers = KnownWorkers()
        self._outside: dict[int, ReportedWorker] = {}  # workers that were in no view, in order of arrival
        self._uncompared: dict[int, ReportedWorker] = {}  # ready newcomers
        self._stateless = set(kept.newcomers)  # members that have not reported that they have the state
        if kept.view:
            self.view = View(number=kept.view, members=kept.members, newcomers=kept.newcomers, secret=NO_SECRET)
            for each in kept.members:
                report = WorkerReport(number=each.number, host=each.host, port=each.port, place=-1, view=kept.view)
                # Workers of this launcher's earlier processes ended with them
                self.workers.add(ReportedWorker(report, gone=each.number in kept.launched))
        self.forgotten: list[ReportedWorker] = []  # lost newcomers, which must report again
        self.outs: dict[int, str] = {}
        self._losses, self._record = LossHistory(), AccusationRecord()
        self._broken: list[tuple[int, BrokenReport]] = []  # reports about this view, with the reporter's number
        self.now, self._has_begun = 0.0, False  # time of the last event
        self._judges_from = -inf  # connections that break before this time may be restored until then
        self._view_since = self._over_since = self._not_before = 0.0
        self._recorded = False  # whether the failure of this view is recorded
        self._excused = False  # whether the silent members of this view were given more time
        self._undecided_rank = 0  # of a member for which the next view waits
        self.first_here = self._waits_since = self._note_at = inf
        self._noted: set[str] = set()

    # -- evidence ------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """Time of the next check without an event; frequent enough to detect that this process was stopped."""
        moments = [
            self.now + self.options.dead_after_seconds / 4,
            self._note_at,
            self.first_here + self.options.patience_seconds,
        ]
        moments += [self.workers.next_deadline, self._losses.next_opening(self.now)]
        moments += map(self._next_view_from, (1.0, NEWCOMERS_PACES))
        moments += [self._over_since + self.options.dead_after_seconds, self._not_before] if self.is_over else []
        return min(moment for moment in moments if moment > self.now)

    def look_at_clock(self, now: float) -> None:
        """Advance the clock. If this process was stopped, silence in that time does not count against a worker."""
        was_stopped = self._has_begun and now - self.now > self.options.dead_after_seconds / 2
        if was_stopped or not self._has_begun:
            self._excuse_silence(now)
        if was_stopped:
            self._judges_from = now + self.options.dead_after_seconds
        if not self._has_begun:
            self._has_begun, self._view_since = True, now
        self.now = max(self.now, now)

    def _excuse_silence(self, now: float) -> None:
        """Give each silent worker the full time to answer again."""
        self._over_since = now
        for each in self.workers.values():
            if not each.connected:
                self.workers.wait_until(each, now + self.options.dead_after_seconds)

    def learn(self, report: WorkerReport, peer: Peer) -> ReportedWorker:
        """Record a report. The first one of a new process ends the earlier process of the same peer."""
        if report.fingerprint and report.fingerprint == self.fingerprint:
            report = replace(report, fingerprint=self.fingerprint)  # one text for all
        worker = self.workers.get(report.number)
        if worker is None:
            for each in self.workers.of_peer(peer):
                self.workers.end(each)
            worker = self._outside[report.number] = ReportedWorker(report)
            self.workers.add(worker)
            if self.view is None and self.first_here == inf:
                self.first_here = self.now
        worker.learn(report)
        if worker.report.ready and not worker.is_compared:
            self._uncompared[worker.number] = worker
        if worker.report.has_state:
            self._stateless.discard(worker.number)
        return worker

    def record_contact(self, worker: ReportedWorker, peer: Peer) -> None:
        """Record a message from a worker.

        If a lost member returns while too few are present, a network partition may have healed. The remaining members
        may follow a moment later, so they are given more time, once per view.
        """
        view, silent_at = self.view, self._over_since + self.options.dead_after_seconds
        was_lost = (
            self.is_over
            and view is not None
            and view.holds(worker.number)
            and worker.evidence(view.number, self.now, silent_at) == LOST
        )
        self.workers.reconnect(worker, peer)
        if was_lost and not self._excused and not worker.is_lost(self.now):
            self._excused = True
            self._excuse_silence(self.now)

    def connection_closed(self, worker: ReportedWorker) -> None:
        if worker.connected:
            self.workers.close(worker, max(self.now + self._reconnect_seconds, self._judges_from))

    def broke(self, number: int, report: BrokenReport) -> None:
        """Record that a member cannot continue in a view."""
        if self.view is not None and report.view == self.view.number and self.view.holds(number):
            self._broken.append((number, replace(report, why="")))
            self.declare_over()

    @property
    def living(self) -> frozenset[int]:
        """Numbers of the view's members that are not known to be lost."""
        members = self.view.members if self.view is not None else ()
        return frozenset(each.number for each in members if not self.workers[each.number].is_lost(self.now))

    @property
    def survivors(self) -> list[ReportedWorker]:
        """Members of the view, without those known to have ended."""
        members = self.view.members if self.view is not None else ()
        return [self.workers[each.number] for each in members if not self.workers[each.number].gone]

    def launched(self, number: int) -> None:
        """Record that the coordinator's launcher has started this worker, so both end together."""
        self._journal.append({"launched": number})

    def resize(self, most: int) -> str:
        """Set the maximum number of members; the newest ones are evicted. Returns a description of the effect."""
        if self.ended:
            return f"the run is over: {self.ended}"
        if not self.least <= most <= MOST_MEMBERS:
            return (
                f"refused: this run was started with at least {self.least} workers, so it can have {self.least} to "
                f"{MOST_MEMBERS}, got {most}"
            )
        before, self.most, self.resizes = self.most, most, self.resizes + 1
        self._journal.append({"most": most})
        there = 0 if self.view is None else self.view.world
        puts_out = f"; the newest {there - most} of {there} are evicted" if there > most else ""
        text = f"at most {most} workers from now on (before: {before}){puts_out}"
        self._note(text)
        return text

    def leaves(self, worker: ReportedWorker, finished: bool) -> None:
        """Record that a worker leaves. finished: its training is complete, so fewer than `least` may remain."""
        self.workers.end(worker, left=True)
        if finished and not self.finishing:
            self.finishing = True
            self._journal.append({"finishing": True})

    def attached(self, number: int, fingerprint: str) -> None:
        """Store the fingerprint that newcomers must match: that of the first member to report one. Members in lock step
        have compared theirs; others are compared here."""
        if self.view is None or not self.view.holds(number):
            return
        if not self.fingerprint:
            self.fingerprint = fingerprint
            self._journal.append({"fingerprint": fingerprint})
        elif self.options.servers:
            self.workers[number].refused = _compared(self.fingerprint, fingerprint)

    # -- changes -------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Perform all changes that are due."""
        self.workers.look(self.now)
        self._forget_outside()
        if self.ended:
            return
        if self.fingerprint:
            for each in self._uncompared.values():
                each.is_compared, each.refused = True, _compared(self.fingerprint, each.report.fingerprint)
            self.workers.changed |= self._uncompared
            self._uncompared.clear()
        if self.view is None:
            self._begin()
        elif not self.is_over and self.now >= self._next_view_from() and self._change_is_due():
            self.declare_over()
        if self.is_over:
            self._decide()

    def _forget_outside(self) -> None:
        """Forget lost workers that are not in the view."""
        lost, self.workers.newly_lost = self.workers.newly_lost, []
        for each in lost:
            if each.number in self.workers.lost and (self.view is None or not self.view.holds(each.number)):
                self.forgotten.append(each)
                self.workers.forget(each)
                self._outside.pop(each.number, None)
                self._uncompared.pop(each.number, None)

    def _begin(self) -> None:
        """Create the first view, once enough workers are connected."""
        waited = self.now >= self.first_here + self.options.patience_seconds
        needed = self.least if waited else self.initial
        if self.workers.connected < needed and self._waits_since < inf and self.now < self._note_at:
            return
        here = [each for each in self.workers.values() if each.connected and not each.left and not each.gone]
        if len(here) < needed:
            self._note_waits(f"{len(here)} of {self.initial} workers are connected", 0.0)
            return
        here.sort(key=lambda each: (each.report.place < 0, each.report.place))  # in order of arrival within a slot
        self._make_view(here[: self.most], frozenset())

    def _change_is_due(self) -> bool:
        assert self.view is not None
        if any(map(self.view.holds, self.workers.lost)) or self.view.world > self.most:
            return True
        may_admit = self.view.world < self.most and self.now >= self._next_view_from(NEWCOMERS_PACES)
        return may_admit and self._all_have_state() and bool(self._newcomers())

    def declare_over(self) -> None:
        if not self.is_over:
            self.is_over, self._recorded, self._excused = True, False, False
            self._over_since, self._not_before = self.now, max(self.now, self._next_view_from())
            self._waits_since, self._undecided_rank = inf, 0

    def _decide(self) -> None:
        """Create the next view, once each member is known to be alive or lost."""
        assert self.view is not None
        if self._waits_for_member() or (self.now < self._not_before and (self._recorded or not self._broken)):
            return
        silent_at = self._over_since + self.options.dead_after_seconds
        workers = [self.workers[each.number] for each in self.view.members]
        evidence = {each: each.evidence(self.view.number, self.now, silent_at) for each in workers}
        alive = [each for each in workers if evidence[each] == ALIVE]
        self._remember_how_it_broke(explained=len(alive) < len(workers))
        if self.now < self._not_before:
            return
        outs = {each: each.why_lost(self.options.dead_after_seconds) for each in workers if evidence[each] == LOST}
        stay = self._without_accused(alive, outs)
        newcomers = self._newcomers()
        if not any(map(self._has_state, stay)) and not (self.options.servers and newcomers):
            self._end_without_state(workers)
        elif len(stay) + len(newcomers) < self.least and not self.finishing:
            missing = self.least - len(stay) - len(newcomers)
            self._note_waits(f"{missing} more workers are needed, for a minimum of {self.least}", SOON_SECONDS)
        else:
            self._make_next(stay, newcomers, outs)

    def _waits_for_member(self) -> bool:
        """Whether a member is undecided. The one that was found last is examined first, then those after it, so that
        the reports of all members cost one pass together."""
        assert self.view is not None
        members, silent_at = self.view.members, self._over_since + self.options.dead_after_seconds
        for rank in chain(range(self._undecided_rank, len(members)), range(self._undecided_rank)):
            worker = self.workers[members[rank].number]
            if worker.evidence(self.view.number, self.now, silent_at) == UNDECIDED:
                self._undecided_rank = rank
                return True
        return False

    def _next_view_from(self, paces: float = 1.0) -> float:
        """Earliest time of the next view: large views follow each other at a rate that all members can follow. A view
        takes up all changes since the last one, so newcomers wait for a loss, for NEWCOMERS_PACES at most."""
        world = 0 if self.view is None else self.view.world
        return self._view_since + paces * SECONDS_A_MEMBER * max(0, world - FREE_MEMBERS)

    def _remember_how_it_broke(self, *, explained: bool) -> None:
        if self._recorded or not self._broken:
            return
        self._recorded = True
        self._record.broke(
            {(number, suspect) for number, report in self._broken for suspect in report.suspects},
            explained=explained,
            went_on=any(report.went_on for _, report in self._broken),
            seconds=self._over_since - self._view_since,
        )
        self._not_before = max(self._not_before, self._over_since + self._record.pause_seconds())

    def _without_accused(self, alive: list[ReportedWorker], outs: dict[ReportedWorker, str]) -> list[ReportedWorker]:
        """Live members, without one that cannot work with the rest, provided that enough remain."""
        number = self._record.blamed([each.number for each in alive])
        stay = [each for each in alive if each.number != number]
        if number is None or len(stay) < self.least or not any(map(self._has_state, stay)):
            return alive
        self._record.clear()
        outs[self.workers[number]] = (
            "several views in a row broke, and this worker has the fewest connections (among several, it joined last)"
        )
        return stay

    def _make_next(
        self, stay: list[ReportedWorker], newcomers: Sequence[ReportedWorker], outs: dict[ReportedWorker, str]
    ) -> None:
        assert self.view is not None
        kept = sorted(stay, key=self._has_state, reverse=True)[: self.most]  # members with parameters are kept first
        staying, remaining = set(stay), set(kept)
        outs |= {each: f"{RESIZED} to {self.most} workers" for each in stay if each not in remaining}
        members = [each for each in stay if each in remaining]
        joining = list(newcomers)[: self.most - len(members)]
        no_state = frozenset(each.number for each in (*members, *joining) if not self._has_state(each))
        for each, why in outs.items():
            self.outs[each.number] = f"it was evicted after view {self.view.number}: {why}"
            if not each.left and each not in staying:
                self._losses.lost(each.spot, self.now)
        while len(self.outs) > MOST_OUTS:
            del self.outs[next(iter(self.outs))]
        text = [f"{each.name} is out: {why}" for each, why in outs.items()]
        text += [f"{each.name} joins" for each in joining]
        if len(text) > MOST_NAMED:
            text[MOST_NAMED:] = [f"{len(text) - MOST_NAMED} more changes"]
        self._make_view([*members, *joining], no_state)
        self._note(f"view {self.view.number}: {self.view.world} workers. {'; '.join(text) or 'All continue'}")

    def _make_view(self, workers: Sequence[ReportedWorker], newcomers: frozenset[int]) -> None:
        view = View(
            number=1 if self.view is None else self.view.number + 1,
            members=tuple(each.member for each in workers),
            newcomers=newcomers,
            secret=self._draw(SECRET_BYTES),
        )
        self.began = view.world if self.view is None else self.began
        self._journal.append(view_entry(view) if self.view else {**view_entry(view), "began": self.began})
        self.last_view, self.view, self.is_over, self._view_since = self.view, view, False, self.now
        self._stateless = {number for number in newcomers if not self.workers[number].report.has_state}
        for each in workers:
            self._outside.pop(each.number, None)
        self.workers.newly_lost += [each for number, each in self.workers.lost.items() if not view.holds(number)]
        self._broken, self._waits_since, self._note_at, self.first_here = [], inf, inf, inf

    def _end_without_state(self, workers: Sequence[ReportedWorker]) -> None:
        holders = [each for each in workers if self._has_state(each)]
        if self.finishing or all(each.left for each in holders):
            self.end(ALL_LEFT)
        elif self.options.servers:
            self._note_waits("no worker is left, and the servers have the parameters", SOON_SECONDS)
        elif all(each.left or each.gone for each in holders):
            self.end("no worker with the parameters is left. Restart from the last checkpoint")
        elif self.now >= self._over_since + self.options.end_after_seconds:
            self.end(
                f"no worker with the parameters was reachable for {self.options.end_after_seconds:g} s. Restart from "
                "the last checkpoint"
            )
        else:
            self._note_waits("no worker with the parameters is reachable", SOON_SECONDS)

    def end(self, why: str) -> None:
        self.ended = why
        self._journal.append({"ended": why})
        self._note(f"The run is over: {why}.")

    # -- members -------------------------------------------------------------------------------------------------------

    def _has_state(self, worker: ReportedWorker) -> bool:
        """Whether this worker is a member that has the parameters."""
        assert self.view is not None
        taken_over = bool(self.options.servers) or worker.number not in self.view.newcomers or worker.report.has_state
        return self.view.holds(worker.number) and taken_over

    def _all_have_state(self) -> bool:
        """Whether the last newcomers have received the whole state. Another newcomer would interrupt the transfer."""
        return all(self._has_state(self.workers[number]) for number in self._stateless)

    def _newcomers(self) -> list[ReportedWorker]:
        """Workers that can be admitted now, in order of arrival."""
        return [each for each in self._outside.values() if self.why_not_in(each) == ""]

    def why_not_in(self, worker: ReportedWorker) -> str:
        """Why a newcomer is not admitted, apart from the maximum number of members; empty if it can be admitted."""
        if worker.report.view or worker.number in self.outs or worker.left or worker.gone or worker.refused:
            return worker.refused or "it was a member before, and can only rejoin as a new process"
        if not worker.report.ready or not worker.connected:
            return "it is not ready"
        if not worker.is_compared:
            return "the members have not reported the fingerprint that it must match"
        if self.finishing:
            return "the run is about to end"
        count, opens_at = self._losses.count(worker.spot), self._losses.opens_at(worker.spot)
        if self.now >= opens_at:
            return ""
        why = f"{count} workers of its slot were lost in a row; it is admitted in {opens_at - self.now:.1f} s"
        self._note_once(f"{worker.name} waits: {why}", f"back-off of {worker.number}")
        return why

    def _note_waits(self, what: str, first_after_seconds: float) -> None:
        """Report for what and for how long the run has been waiting: soon, then every ten seconds."""
        if self._waits_since == inf:
            self._waits_since, self._note_at = self.now, self.now + (first_after_seconds or NOTICE_SECONDS)
        if self.now >= self._note_at and self.workers:
            self._note_at = self.now + NOTICE_SECONDS
            self._note(f"The run has been waiting for {self.now - self._waits_since:.0f} s: {what}.")

    def _note_once(self, what: str, about: str) -> None:
        if about not in self._noted:
            self._noted.add(about)
            self._note(what)


def _compared(run: str, newcomer: str) -> str:
    """Why a newcomer is refused; empty if its fingerprint matches."""

    try:
        return difference(run, newcomer)
    except MalformedError as error:
        return str(error)
