"""Invariants of elastic runs: what must hold whatever is killed, stopped or cut off; each has a twin that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.membership_runs import ElasticRun, Entry, Process, ViewBroke

from gossamer.base.peer_ops import Peer, PeerOp, PeerScript, Pulled
from gossamer.comm.membership.coordinator import Coordinator
from gossamer.comm.membership.journal import Entry as JournalEntry
from gossamer.comm.membership.journal import MemoryJournal
from gossamer.comm.membership.known_worker import ReportedWorker
from gossamer.comm.membership.messages import WorkerReport
from gossamer.comm.membership.next_view import ViewPolicy
from gossamer.comm.membership.view import View
from gossamer.comm.runtime.transaction import Resolution


def one_view_a_number(run: ElasticRun) -> None:
    """Whoever tells of a view tells of the same one: no two coordinators, no two sides."""
    views: dict[int, View] = {}
    for process in run.processes:
        for number, view in process.views.items():
            assert views.setdefault(number, view) == view, f"two views {number}: {views[number]} and {view}"
            assert view.holds(process.number), f"{process.number} is in view {number}, which does not hold it"


def survivors_in_every_view(run: ElasticRun) -> None:
    """A view after the first holds somebody of the one before who has the state, and those stay in their order."""
    views = {number: view for process in run.processes for number, view in process.views.items()}
    for number, view in views.items():
        state = [each.number for each in view.members if each.number not in view.newcomers]
        assert state, f"nobody in view {number} has the state"
        if number - 1 in views:
            before = [each.number for each in views[number - 1].members]
            stayed = [each.number for each in view.members if each.number in before]
            assert stayed == [each for each in before if each in stayed], f"view {number} changes the order"
            assert set(state) <= set(before), f"view {number} takes a newcomer for one who has the state"


def whole_transactions(run: ElasticRun) -> None:
    """A completed transaction holds the parts of all members of its view, and none is completed twice."""
    views = {number: view for process in run.processes for number, view in process.views.items()}
    for process in run.processes:
        steps = [step for step, _, _ in process.entries]
        assert steps == list(range(len(steps))), f"{process.number} completed {steps}"
        for step, number, who in process.entries:
            members = tuple(sorted(each.number for each in views[number].members))
            assert who == members, f"transaction {step} of view {number}, of {members}, holds {who}"


def one_history(run: ElasticRun) -> None:
    """In every view all, newcomers too, go on from the same. Nothing that was completed by one who goes on is lost; of
    what was completed by others, at most the last, where all who had completed it are gone."""
    agreed: dict[int, tuple[Entry, ...]] = {}
    for process in run.processes:
        for number, entries in process.agreed.items():
            assert agreed.setdefault(number, entries) == entries, f"view {number} goes on from two histories"
    for process in run.processes:
        for number, later in agreed.items():
            if number in process.agreed:
                kept = [each for each in process.entries if each[1] < number]
            else:
                kept = [each for each in process.entries if each[1] < number][:-1]
            assert list(later[: len(kept)]) == kept, f"view {number} has lost what {process.number} had completed"


def all_done(run: ElasticRun) -> None:
    """Whoever is done has completed the same transactions, all; somebody is, or all who had the parameters died."""
    done = [process.entries for process in run.processes if process.is_done]
    assert all(entries == done[0] and len(entries) == run.transactions for entries in done), "the ends differ"
    assert run.coordinator is not None
    rule = run.coordinator.rule
    assert done or rule.ended, "nobody is done, and the run goes on"
    if "have left" in rule.ended:
        assert done, "all have left, and nobody is done"
    elif rule.ended and rule.view is not None:
        alive = [machine.process for machine in run.machines if not machine.process.is_done]
        holders = [process.number for process in alive if rule.view.number in process.agreed]
        assert not holders, f"the run ended though {holders} have the parameters"


INVARIANTS: Mapping[str, Callable[[ElasticRun], None]] = {
    each.__name__: each
    for each in (one_view_a_number, survivors_in_every_view, whole_transactions, one_history, all_done)
}


def check(run: ElasticRun) -> None:
    """Raise AssertionError where an invariant does not hold."""
    for each in INVARIANTS.values():
        each(run)


# -- rules that are wrong ----------------------------------------------------------------------------------------------


class Hasty(Process):
    """Completes a transaction with the parts of whoever answers."""

    def gather(self, view: View, what: str, mine: str) -> Generator[PeerOp, Any, dict[int, str]]:
        try:
            return (yield from super().gather(view, what, mine))
        except ViewBroke:
            if what.startswith("transaction"):
                return {self.number: mine}
            raise


class Careless(Process):
    """Tells others of whatever view what it says in its own, and does not mind that its own is over."""

    def answer(self, view: int, what: str) -> Pulled | None:
        text = self.shown.get((self.view, what))
        return None if text is None else Pulled(version=0, about=text)


class Presumptuous(Process):
    """As a newcomer, goes on as if it had what the others have."""

    def agree(self, view: View) -> PeerScript:
        before = list(self.entries)
        yield from super().agree(view)
        if self.number in view.newcomers:
            self.entries = before
            self.agreed[view.number] = tuple(before)


class Forgiving(Process):
    """Makes a broken transaction again, also where somebody has completed it."""

    def resolve(self, survivors: dict[int, int]) -> Resolution:
        return Resolution(completed=min(survivors.values()), donors={})


class Generous(ViewPolicy):
    """Takes whoever is in a view for one who has the parameters."""

    def _has_state(self, worker: ReportedWorker) -> bool:
        return True


class Forgetful(MemoryJournal):
    """Keeps nothing."""

    def append(self, entry: JournalEntry) -> None: ...


class Credulous(Coordinator):
    """Takes members of views that it has never made for workers that wait for the first one."""

    def _check_newer(self, view: int) -> None: ...

    def _reported(self, token: int, sender: Peer, key: str, report: WorkerReport) -> None:
        super()._reported(token, sender, key, replace(report, view=0, run=""))


TWINS: Mapping[str, Callable[[int], ElasticRun]] = {
    "completes without all": lambda seed: ElasticRun(seed, process=Hasty),
    "answers for views that are over": lambda seed: ElasticRun(seed, process=Careless),
    "joins without the state": lambda seed: ElasticRun(seed, process=Presumptuous),
    "makes again what is complete": lambda seed: ElasticRun(seed, process=Forgiving),
    "a coordinator that takes newcomers for others": lambda seed: ElasticRun(seed, view_policy=Generous),
    "a coordinator without a journal": lambda seed: ElasticRun(seed, rule=Credulous, journal=Forgetful),
}


def caught(twin: str, seed: int) -> str:
    """By which invariant a wrong rule is found out in this run; empty where it is not."""
    run = TWINS[twin](seed)
    try:
        run.go()
    except AssertionError as error:
        return "bounded_progress" if "virtual seconds" in str(error) or "words" in str(error) else "in the run"
    except Exception as error:  # a count that differs by more than one
        return type(error).__name__
    for name, each in INVARIANTS.items():
        try:
            each(run)
        except (AssertionError, KeyError):
            return name
    return ""
