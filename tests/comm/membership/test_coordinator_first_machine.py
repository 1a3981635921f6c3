"""The first machine of an elastic run dies, with its coordinator, and is started again: in virtual time.

Machine 0 is the coordinator's. Its workers end with the coordinator; those of the other machines survive.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.membership_invariants import check
from benchmarks.membership_runs import DEAD_AFTER_SECONDS, ElasticRun, Machine, of_all_roles, within_machines
from support.coordinator_desk import Desk
from support.fault_seeds import replayed

from gossamer.base.peer_ops import Peer, PeerScript
from gossamer.comm.membership.journal import MemoryJournal, Remembered
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.membership.view import View
from gossamer.comm.membership.view_policy import ViewPolicy
from gossamer.comm.simulation import compute
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork

WORKERS, DIES, BACK = 4, 4.0, 12.0
SEEDS = range(12)


class FirstMachineDies(ElasticRun):
    """keeps: whether the coordinator that is started again finds the journal of the one before."""

    def __init__(self, seed: int, *, keeps: bool) -> None:
        super().__init__(seed)
        self.count = self.initial = self.most = WORKERS
        self.least, self.transactions, self._keeps = 2, 60, keeps
        self.machines = [Machine(each, self, 0.0) for each in range(WORKERS)]
        self.kept = MemoryJournal()
        self._journal = lambda: self.kept

    def coordinating(self) -> PeerScript:
        if not self._keeps:
            self.kept = MemoryJournal()
        for process in self.machines[0].processes:
            self.kept.append({"launched": process.number})
        if self.coordinator is not None:
            self.initial = 2
        return super().coordinating()

    def resizing(self) -> PeerScript:
        yield from compute(0.0)

    def network(self) -> VirtualNetwork:
        first = Peer("worker", 0)
        faults = [*of_all_roles([Kill(first, DIES)]), Kill(COORDINATOR, DIES), Restart(COORDINATOR, BACK)]
        return VirtualNetwork(
            round_trip_seconds=self.random.choice((0.002, 0.05)),
            jitter_seconds=self.random.choice((0.0, 0.01)),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            resend_seconds=0.2,
            faults=(*faults, *of_all_roles([Restart(first, BACK)])),
            links=within_machines(WORKERS),
        )

    def runs(self) -> set[str]:
        return {process.scripts.report.run for process in self.processes}


def test_promise_22_the_same_command_continues_the_run_with_the_survivors() -> None:
    for seed in SEEDS:
        with replayed(seed, "the_same_command_continues_the_run"):
            run = FirstMachineDies(seed, keeps=True).go()
            check(run)
            assert len(run.runs()) == 1
            assert [len(machine.processes) for machine in run.machines] == [2, 1, 1, 1], run.notes
            assert all(machine.process.is_done for machine in run.machines)


def test_promise_22_a_worker_of_an_earlier_run_cannot_end_another() -> None:
    """The journal is lost, so another run begins at the same address, and the survivors of the first one report."""
    for seed in SEEDS:
        with replayed(seed, "a_stale_worker_ends_no_other_run"):
            run = FirstMachineDies(seed, keeps=False).go()
            assert len(run.runs()) == 2
            for number in range(1, WORKERS):
                stale, successor = run.machines[number].processes
                assert f"belongs to run {stale.scripts.report.run:.8}" in stale.scripts.out
                assert successor.is_done, run.notes
            assert run.coordinator is not None
            assert "have left" in run.coordinator.rule.ended
            views: dict[tuple[str, int], View] = {}
            for process in run.processes:
                for number, view in process.views.items():
                    assert views.setdefault((process.scripts.report.run, number), view) == view


# -- the rules by themselves -------------------------------------------------------------------------------------------


def started_again(desk: Desk, journal: MemoryJournal) -> Desk:
    """Another coordinator at the same address, to which the workers of `desk` report."""
    other = Desk(journal)
    other.known, other.news, other.runs = dict(desk.known), dict(desk.news), dict(desk.runs)
    other.silent = set(desk.silent)
    return other


@pytest.mark.parametrize("key", ["here", "here again", "ready", "attached"])
def test_a_report_of_another_run_is_refused_alone(key: str) -> None:
    desk = Desk()
    desk.begin(1, 2)
    other = started_again(desk, MemoryJournal())
    other.begin(5, 6)
    other.say(1, key, view=7, fingerprint="{}")
    answer = other.answers[1][-1]
    assert answer.version == -1
    assert f"belongs to run {desk.rule.run:.8}" in other.standing(1).refused
    assert (other.rule.ended, other.members) == ("", [5, 6])
    assert 1 not in other.rule.workers


def test_a_poll_of_an_unknown_worker_ends_no_run() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk.known[9], desk.news[9] = 2 * 50, desk.news[1]
    desk.runs[9] = "f" * 32
    desk.poll(9)
    assert (desk.rule.ended, desk.members) == ("", [1, 2])


def test_a_report_of_a_view_without_a_run_is_refused_alone() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk.say(9, "here", view=7)
    assert desk.standing(9).refused
    assert desk.rule.ended == ""


def test_each_run_has_an_identity_of_its_own_which_its_journal_keeps() -> None:
    journal = MemoryJournal()
    first = Desk(journal)
    assert first.rule.run == Desk(journal).rule.run == journal.load().run
    assert len({Desk().rule.run for _ in range(20)}) == 20


def test_workers_that_the_first_launcher_had_started_are_not_waited_for() -> None:
    desk = Desk(initial=3)
    desk.rule.launched(1)
    desk.begin(1, 2, 3)
    other = started_again(desk, desk.journal)
    assert [each.number for each in other.rule.survivors] == [2, 3]
    other.wait(0.5)
    assert other.members == [2, 3]
    assert other.rule.run == desk.rule.run


def test_a_journal_remembers_all_workers_that_were_launched() -> None:
    remembered = Remembered().after({"launched": 3}).after({"launched": 2**62}).after({"launched": 3})
    assert remembered.launched == {3, 2**62}


def test_a_run_that_is_ended_from_outside_tells_its_workers() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk._hand_out(desk.coordinator.end("its first launcher has ended", desk.now))
    assert {desk.news[each].out for each in (1, 2)} == {"its first launcher has ended"}
    desk.coordinator.end("again", desk.now)
    assert desk.rule.ended == "its first launcher has ended"
    assert desk.journal.load().ended == "its first launcher has ended"


class Trusting(ViewPolicy):
    """Takes the workers of its own earlier start for living ones."""

    @property
    def survivors(self):  # type: ignore[no-untyped-def]
        return [self.workers[each.number] for each in self.view.members] if self.view else []


def test_the_check_of_launched_workers_notices_a_rule_that_forgets_them() -> None:
    desk = Desk(initial=2)
    desk.rule.launched(1)
    desk.begin(1, 2)
    assert len(Desk(desk.journal, rule=Trusting).rule.survivors) == 2
    assert len(Desk(desk.journal).rule.survivors) == 1


def test_a_coordinator_that_is_started_again_journals_no_second_identity() -> None:
    journal = MemoryJournal()
    run, written = Desk(journal).rule.run, list[Any]()
    journal.append = written.append  # type: ignore[method-assign]
    assert Desk(journal).rule.run == run
    assert not [entry for entry in written if "run" in entry]
