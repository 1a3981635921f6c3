"""View policy: decides when a view is over, who is in the next one, and when the run is.

A change (a loss, a leave, a newcomer that is ready, a resize, a report that it broke) first declares the view over.
Once every member has closed it, which proves that it lives, or is lost, the next one is made of those that live, in
their order, and of the newcomers that are ready. It holds somebody who has the parameters, or the run is over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from gossamer.base.peer_ops import Peer
from gossamer.comm.membership.fingerprints import difference
from gossamer.comm.membership.heard_worker import ALIVE, LOST, UNDECIDED, HeardWorker
from gossamer.comm.membership.journal import ViewJournal, view_entry
from gossamer.comm.membership.messages import ALL_LEFT, RESIZED, BrokenReport, WorkerReport
from gossamer.comm.membership.view import MOST_MEMBERS, SECRET_BYTES, View
from gossamer.errors import MalformedError, require

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 30.0
LOSS_FORGOTTEN_SECONDS = 300.0  # without a loss: what comes then is the first again


@dataclass
class LossHistory:
    """Losses by place. A worker there is let in 1 s after the first loss, 2 s after the second, at most 30 s."""

    _losses: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many in a row, and when the last was

    def lost(self, place: str, now: float) -> None:
        count, last = self._losses.get(place, (0, now))
        self._losses[place] = (1 if now - last > LOSS_FORGOTTEN_SECONDS else count + 1), now

    def count(self, place: str) -> int:
        return self._losses.get(place, (0, 0.0))[0]

    def opens_at(self, place: str) -> float:
        """When a worker there may be let in; a moment that has passed where nothing was lost."""
        if place not in self._losses:
            return float("-inf")
        count, last = self._losses[place]
        return last + min(FIRST_SECONDS * 2.0 ** min(count - 1, 10), LONGEST_SECONDS)


TRIES = 3  # views in a row that broke, before somebody is put out
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
VIEW_HELD_SECONDS = 600.0  # a view that held for so long went on, whether anybody says so or not

Accusation = tuple[int, int]  # numbers of who accuses and who is accused


def least_connected(members: Sequence[int], accusations: Iterable[Accusation]) -> int | None:
    """The member that the fewest others are connected to; of several the one that came last.

    members: in the order in which they came. Two are connected unless one of them accuses the other: whose word is
    right nobody can tell. None where nobody of them accuses another.
    """
    pairs = {frozenset(each) for each in accusations if each[0] != each[1] and set(each) <= set(members)}
    if not pairs:
        return None
    apart = {member: sum(member in pair for pair in pairs) for member in members}
    return max(members, key=lambda member: (apart[member], members.index(member)))


@dataclass
class AccusationRecord:
    """What was said in the views that broke one after the other, without a loss that would explain it."""

    _views: list[frozenset[Accusation]] = field(default_factory=list)  # the last TRIES
    _count: int = 0  # of all of them

    def broke(self, accusations: Set[Accusation], *, explained: bool, went_on: bool, seconds: float) -> None:
        """A view broke. explained: somebody was lost. went_on: something was completed in it. seconds: it held."""
        if explained or went_on or seconds > VIEW_HELD_SECONDS:
            self.clear()
        if not explained:
            self._views = [*self._views, frozenset(accusations)][-TRIES:]
            self._count += 1

    def pause_seconds(self) -> float:
        """Before the next view: views that break at once must not follow each other as fast as they can."""
        doublings = min(self._count - 2, 10)
        return 0.0 if doublings < 0 else min(FIRST_PAUSE_SECONDS * 2.0**doublings, LONGEST_PAUSE_SECONDS)

    def whom(self, members: Sequence[int]) -> int | None:
        """Who is to be put out by now, if anybody: where somebody was accused in each of so many views."""
        if len(self._views) < TRIES or not all(self._views):
            return None
        return least_connected(members, {each for view in self._views for each in view})

    def clear(self) -> None:
        self._views, self._count = [], 0


NOTICE_SECONDS = 10.0  # between words about a run that waits
SOON_SECONDS = 1.0  # before the first: at a run's end all leave one after the other
NO_SECRET = bytes(SECRET_BYTES)  # of a view that a journal tells of
RUN_BYTES = 16  # of a run's identity


class ViewPolicy:
    """The newest view and what is known of each worker; it knows no clock but `now`, no socket and no message.

    least, most: members of a view. initial: workers with which the first view begins, or `least` of them once
    patience_seconds have passed since the first came. dead_after_seconds: without a sign of life. reconnect_seconds:
    that a member whose connection broke has to come back. end_after_seconds: that members are waited for when nobody
    who has the parameters can be heard. note: is told what users should know. draw: random bytes.
    """

    def __init__(
        self,
        *,
        least: int,
        most: int,
        initial: int,
        journal: ViewJournal,
        note: Callable[[str], None],
        dead_after_seconds: float = 5.0,
        reconnect_seconds: float = 0.1,
        patience_seconds: float = 300.0,
        end_after_seconds: float = 300.0,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        require(
            1 <= least <= initial <= most,
            f"least <= initial <= most, and not {least}, {initial} and {most} workers: write --workers 2:8",
        )
        self.least, self.initial, self._journal, self._note, self._draw = least, initial, journal, note, draw
        self._dead_after_seconds = dead_after_seconds
        self._reconnect_seconds = min(reconnect_seconds, dead_after_seconds)
        self._patience_seconds, self._end_after_seconds = patience_seconds, end_after_seconds
        kept = journal.load()
        self.run = kept.run or draw(RUN_BYTES).hex()
        if not kept.run:
            journal.append({"run": self.run})
        self.most, self.ended, self.fingerprint = kept.most or most, kept.ended, kept.fingerprint
        self.began = kept.began  # members of the first view
        self.resizes = 0  # so often somebody said how many workers there may be
        self.finishing = kept.finishing
        self.view: View | None = None
        self.is_over = False
        self.workers: dict[int, HeardWorker] = {}
        if kept.view:
            self.view = View(number=kept.view, members=kept.members, newcomers=kept.newcomers, secret=NO_SECRET)
            for each in kept.members:
                report = WorkerReport(number=each.number, host=each.host, port=each.port, place=-1, view=kept.view)
                # The workers of this launcher's earlier starts have ended with it
                self.workers[each.number] = HeardWorker(report, gone=each.number in kept.launched)
        self.forgotten: list[HeardWorker] = []  # newcomers that were lost: they are to report again
        self.outs: dict[int, str] = {}
        self._losses, self._record = LossHistory(), AccusationRecord()
        self._broken: list[tuple[int, BrokenReport]] = []  # who says so of this view
        self.now, self._has_begun = 0.0, False  # the last event's moment
        self._judges_from = -inf  # a connection that breaks before may be back until then
        self._view_since = self._over_since = self._not_before = 0.0
        self._recorded = False  # how this view broke
        self._excused = False  # whether those who were silent in this view were given more time
        self.first_here = self._waits_since = self._note_at = inf
        self._said: set[str] = set()

    # -- evidence ------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When to look again even if nothing happens: often enough to notice that this process itself was stopped."""
        moments = [self.now + self._dead_after_seconds / 4, self._note_at, self.first_here + self._patience_seconds]
        moments += [each.lost_at for each in self.workers.values() if not each.connected]
        moments += [self._losses.opens_at(each.spot) for each in self.workers.values() if each.report.ready]
        moments += [self._over_since + self._dead_after_seconds, self._not_before] if self.is_over else []
        return min(moment for moment in moments if moment > self.now)

    def look_at_clock(self, now: float) -> None:
        """After a stop of this process, nobody is judged by a silence of which it was the cause."""
        was_stopped = self._has_begun and now - self.now > self._dead_after_seconds / 2
        if was_stopped or not self._has_begun:
            self._excuse_silence(now)
        if was_stopped:
            self._judges_from = now + self._dead_after_seconds
        if not self._has_begun:
            self._has_begun, self._view_since = True, now
        self.now = max(self.now, now)

    def _excuse_silence(self, now: float) -> None:
        """Whoever is silent is given the time to be heard that it had when its silence began."""
        self._over_since = now
        for each in self.workers.values():
            if not each.connected:
                each.lost_at = now + self._dead_after_seconds

    def heard(self, worker: HeardWorker, peer: Peer) -> None:
        """A worker is heard. The first member that was lost and comes back while too few are there tells that a cut may
        have healed. Others behind it are heard a moment later, so that they are given time, once in a view."""
        view, silent_at = self.view, self._over_since + self._dead_after_seconds
        was_lost = (
            self.is_over
            and view is not None
            and view.holds(worker.number)
            and worker.evidence(view.number, self.now, silent_at) == LOST
        )
        worker.hear(peer)
        if was_lost and not self._excused and not worker.is_lost(self.now):
            self._excused = True
            self._excuse_silence(self.now)

    def connection_closed(self, worker: HeardWorker) -> None:
        if worker.connected:
            worker.close(max(self.now + self._reconnect_seconds, self._judges_from))

    def broke(self, number: int, report: BrokenReport) -> None:
        """A member cannot go on in a view."""
        if self.view is not None and report.view == self.view.number and self.view.holds(number):
            self._broken.append((number, report))
            self.declare_over()

    @property
    def living(self) -> frozenset[int]:
        """Numbers of the view's members that are not known to be lost."""
        members = self.view.members if self.view is not None else ()
        return frozenset(each.number for each in members if not self.workers[each.number].is_lost(self.now))

    @property
    def survivors(self) -> list[HeardWorker]:
        """The view's members, without those whose processes are known to have ended."""
        members = self.view.members if self.view is not None else ()
        return [self.workers[each.number] for each in members if not self.workers[each.number].gone]

    def launched(self, number: int) -> None:
        """The coordinator's own launcher has started this worker, which ends with it."""
        self._journal.append({"launched": number})

    def resize(self, most: int) -> str:
        """Have at most so many members; the newest are put out. Returns what happens, in words."""
        if self.ended:
            return f"the run is over: {self.ended}"
        if not self.least <= most <= MOST_MEMBERS:
            return (
                f"refused: a run that was started with {self.least} workers at least has {self.least} to "
                f"{MOST_MEMBERS}, not {most}"
            )
        before, self.most, self.resizes = self.most, most, self.resizes + 1
        self._journal.append({"most": most})
        there = 0 if self.view is None else self.view.world
        puts_out = f"; the newest {there - most} of {there} are put out" if there > most else ""
        said = f"at most {most} workers from now on, where it was {before}{puts_out}"
        self._note(said)
        return said

    def leaves(self, worker: HeardWorker, finished: bool) -> None:
        """A worker leaves. finished: as all will, having done everything: those behind may be fewer than `least`."""
        worker.left = True
        if finished and not self.finishing:
            self.finishing = True
            self._journal.append({"finishing": True})

    def attached(self, number: int, fingerprint: str) -> None:
        """A member says what newcomers must be like: the first one's word counts."""
        if not self.fingerprint and self.view is not None and self.view.holds(number):
            self.fingerprint = fingerprint
            self._journal.append({"fingerprint": fingerprint})

    # -- changes -------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Do what has become due."""
        for each in list(self.workers.values()):
            if each.is_lost(self.now) and (self.view is None or not self.view.holds(each.number)):
                self.forgotten.append(self.workers.pop(each.number))
        if self.ended:
            return
        for each in self.workers.values():
            if each.report.ready and self.fingerprint and not each.is_compared:
                each.is_compared, each.refused = True, _compared(self.fingerprint, each.report.fingerprint)
        if self.view is None:
            self._begin()
        elif not self.is_over and self._change_is_due():
            self.declare_over()
        if self.is_over:
            self._decide()

    def _begin(self) -> None:
        """Make the first view, once enough workers are here."""
        here = [each for each in self.workers.values() if each.connected and not each.left and not each.gone]
        waited = self.now >= self.first_here + self._patience_seconds
        if len(here) < (self.least if waited else self.initial):
            self._say_waits(f"{len(here)} of {self.initial} workers are here", 0.0)
            return
        here.sort(key=lambda each: (each.report.place < 0, each.report.place))  # those that came first before others
        self._make_view(here[: self.most], frozenset())

    def _change_is_due(self) -> bool:
        assert self.view is not None
        return (
            any(self.workers[each.number].is_lost(self.now) for each in self.view.members)
            or self.view.world > self.most
            or (self.view.world < self.most and self._all_have_state() and bool(self._newcomers()))
        )

    def declare_over(self) -> None:
        if not self.is_over:
            self.is_over, self._recorded, self._excused = True, False, False
            self._over_since = self._not_before = self.now
            self._waits_since = inf

    def _decide(self) -> None:
        """Make the next view, once of every member it is known whether it lives."""
        assert self.view is not None
        silent_at = self._over_since + self._dead_after_seconds
        workers = [self.workers[each.number] for each in self.view.members]
        evidence = {each: each.evidence(self.view.number, self.now, silent_at) for each in workers}
        if UNDECIDED in evidence.values():
            return
        alive = [each for each in workers if evidence[each] == ALIVE]
        self._remember_how_it_broke(explained=len(alive) < len(workers))
        if self.now < self._not_before:
            return
        outs = {each: each.why_lost(self._dead_after_seconds) for each in workers if evidence[each] == LOST}
        stay = self._without_accused(alive, outs)
        newcomers = self._newcomers()
        if not any(map(self._has_state, stay)):
            self._nobody_has_state(workers)
        elif len(stay) + len(newcomers) < self.least and not self.finishing:
            missing = self.least - len(stay) - len(newcomers)
            self._say_waits(f"{missing} more are needed, for at least {self.least} workers", SOON_SECONDS)
        else:
            self._make_next(stay, newcomers, outs)

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
        self._not_before = self._over_since + self._record.pause_seconds()

    def _without_accused(self, alive: list[HeardWorker], outs: dict[HeardWorker, str]) -> list[HeardWorker]:
        """Those that live, without one who cannot go on with the others, where enough would be left."""
        number = self._record.whom([each.number for each in alive])
        stay = [each for each in alive if each.number != number]
        if number is None or len(stay) < self.least or not any(map(self._has_state, stay)):
            return alive
        self._record.clear()
        outs[self.workers[number]] = (
            "view after view broke, and it is connected to the fewest others (of several such, the one that came last)"
        )
        return stay

    def _make_next(
        self, stay: list[HeardWorker], newcomers: Sequence[HeardWorker], outs: dict[HeardWorker, str]
    ) -> None:
        assert self.view is not None
        kept = sorted(stay, key=self._has_state, reverse=True)[: self.most]  # who has the parameters goes last
        outs |= {each: f"{RESIZED} to {self.most} workers" for each in stay if each not in kept}
        members = [each for each in stay if each in kept]
        joining = list(newcomers)[: self.most - len(members)]
        no_state = frozenset(each.number for each in (*members, *joining) if not self._has_state(each))
        for each, why in outs.items():
            self.outs[each.number] = f"it was put out after view {self.view.number}: {why}"
            if not each.left and each not in stay:
                self._losses.lost(each.spot, self.now)
        said = [f"{each.name} is out: {why}" for each, why in outs.items()]
        said += [f"{each.name} comes in" for each in joining]
        self._make_view([*members, *joining], no_state)
        self._note(f"view {self.view.number}: {self.view.world} workers. {'; '.join(said) or 'All go on'}")

    def _make_view(self, workers: Sequence[HeardWorker], newcomers: frozenset[int]) -> None:
        view = View(
            number=1 if self.view is None else self.view.number + 1,
            members=tuple(each.report.member for each in workers),
            newcomers=newcomers,
            secret=self._draw(SECRET_BYTES),
        )
        self.began = view.world if self.view is None else self.began
        self._journal.append(view_entry(view) if self.view else {**view_entry(view), "began": self.began})
        self.view, self.is_over, self._view_since = view, False, self.now
        self._broken, self._waits_since, self._note_at, self.first_here = [], inf, inf, inf

    def _nobody_has_state(self, workers: Sequence[HeardWorker]) -> None:
        holders = [each for each in workers if self._has_state(each)]
        if self.finishing or all(each.left for each in holders):
            self.end(ALL_LEFT)
        elif all(each.left or each.gone for each in holders):
            self.end("nobody is left who has the parameters. Start again from the last checkpoint")
        elif self.now >= self._over_since + self._end_after_seconds:
            self.end(
                f"nobody who has the parameters was heard for {self._end_after_seconds:g} s. Start again from the last "
                "checkpoint"
            )
        else:
            self._say_waits("nobody who has the parameters can be heard", SOON_SECONDS)

    def end(self, why: str) -> None:
        self.ended = why
        self._journal.append({"ended": why})
        self._note(f"The run is over: {why}.")

    # -- who -----------------------------------------------------------------------------------------------------------

    def _has_state(self, worker: HeardWorker) -> bool:
        """Whether a member has the parameters."""
        assert self.view is not None
        return self.view.holds(worker.number) and (worker.number not in self.view.newcomers or worker.report.has_state)

    def _all_have_state(self) -> bool:
        """Whether the last newcomers have been given everything: one that comes meanwhile would interrupt that."""
        assert self.view is not None
        return all(self._has_state(self.workers[each.number]) for each in self.view.members)

    def _newcomers(self) -> list[HeardWorker]:
        """Those that may be taken in now, in the order in which they came."""
        return [
            each
            for each in self.workers.values()
            if self.why_not_in(each) == "" and self.view is not None and not self.view.holds(each.number)
        ]

    def why_not_in(self, worker: HeardWorker) -> str:
        """Why a newcomer is not taken in, apart from room."""
        if worker.report.view or worker.number in self.outs or worker.left or worker.gone or worker.refused:
            return worker.refused or "it was in the run before, and may come back as a new process"
        if not worker.report.ready or not worker.connected:
            return "it is not ready"
        if not worker.is_compared:
            return "the workers that train have not said yet what it is to be like"
        if self.finishing:
            return "the run is about to end"
        count, opens_at = self._losses.count(worker.spot), self._losses.opens_at(worker.spot)
        if self.now >= opens_at:
            return ""
        why = f"{count} workers of its place were lost in a row: it is let in {opens_at - self.now:.1f} s from now"
        self._say_once(f"{worker.name} waits: {why}", f"back-off of {worker.number}")
        return why

    def _say_waits(self, what: str, first_after_seconds: float) -> None:
        """Say for what the run waits, and for how long it has: soon, and every ten seconds."""
        if self._waits_since == inf:
            self._waits_since, self._note_at = self.now, self.now + (first_after_seconds or NOTICE_SECONDS)
        if self.now >= self._note_at and self.workers:
            self._note_at = self.now + NOTICE_SECONDS
            self._note(f"The run waits, for {self.now - self._waits_since:.0f} s now: {what}.")

    def _say_once(self, what: str, about: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self._note(what)


def _compared(run: str, newcomer: str) -> str:
    """Why a newcomer is refused; empty where it is like the others."""
    try:
        return difference(run, newcomer)
    except MalformedError as error:
        return str(error)
