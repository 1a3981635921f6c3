"""Coordinator: what it answers to whom, also after it was started again, and to messages that nobody should send."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from benchmarks import membership_seeds
from benchmarks.membership_invariants import INVARIANTS, TWINS, Hasty, caught, check
from benchmarks.membership_runs import DEAD_AFTER_SECONDS, ROLES, ElasticRun, Machine, of_all_roles, within_machines
from support.coordinator_desk import Desk
from support.fault_seeds import block_name, blocks, replayed

from gossamer.base.peer_ops import WORKER, Arrived, Peer, PeerLeft, PeerScript, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.membership.journal import MemoryJournal, Remembered
from gossamer.comm.membership.messages import COORDINATOR, NEWS, RELAY_SERVER, RELAYS, Standing
from gossamer.comm.membership.next_view import ViewPolicy
from gossamer.comm.membership.view import MOST_RELAYS, RelayAddress, View
from gossamer.comm.simulation import compute
from gossamer.comm.simulation.faulty_network import Cut, Kill, Restart, VirtualNetwork


def test_a_member_hears_of_each_change_once_and_in_order() -> None:
    desk = Desk()
    first = desk.begin(1, 2)
    assert desk.news[2].read_view() == first
    desk.silent.add(1)
    desk.broken(2)
    assert (desk.news[2].over, desk.news[2].view) == (1, "")
    desk.back(1)
    assert desk.news[1].read_view() == desk.news[2].read_view() == desk.view
    assert desk.known == {1: 4, 2: 4}


@pytest.mark.parametrize(
    ("seen", "others"),
    [(("203.0.113.7", 9), (("203.0.113.7", 9),)), (("h", 9), ()), (None, ())],
    ids=["a router is in between", "the worker's own host", "unknown"],
)
def test_members_receive_the_address_that_a_router_has_given_to_another_one(
    seen: tuple[str, int] | None, others: tuple[tuple[str, int], ...]
) -> None:
    desk = Desk()
    desk.coordinator._address_of = lambda peer: seen if peer.number == 1 else None
    view = desk.begin(1, 2)
    assert [each.others for each in view.members] == [others, ()]


def relay_says(desk: Desk, number: int, about: str) -> list[Any]:
    push = Push(to=COORDINATOR, key=RELAYS, stamp=Stamp(number, 0), about=about)
    return desk.coordinator.react(Arrived(moment=0.0, token=1000, sender=Peer(RELAY_SERVER, number), op=push))


def test_members_receive_the_relays_of_the_run_until_those_leave() -> None:
    desk = Desk(relays=True)
    assert relay_says(desk, 9, '[["10.0.0.9", 5]]') == []  # without an answer it is repeated
    desk.begin(1, 2)
    assert desk.news[1].read_view().relays == (RelayAddress(host="10.0.0.9", port=5, number=9),)
    desk.hear(PeerLeft(moment=0.0, peer=Peer(RELAY_SERVER, 9)))
    desk.broken(2)
    assert desk.news[1].read_view().relays == ()


@pytest.mark.parametrize("about", ["", "3", '[["a"]]', '[["a", 70000]]', '[["", 1]]'])
def test_a_relay_with_an_invalid_address_is_refused(about: str) -> None:
    desk = Desk(relays=True)
    assert "invalid" in relay_says(desk, 9, about)[0].answer.about
    assert desk.coordinator.relays == ()


def test_a_run_that_does_not_seal_refuses_relays_and_no_run_has_more_than_the_limit() -> None:
    desk = Desk()
    assert "--relay" in relay_says(desk, 9, '[["a", 1]]')[0].answer.about
    desk = Desk(relays=True)
    for number in range(MOST_RELAYS + 2):
        relay_says(desk, number, '[["a", 1]]')
    assert len(desk.coordinator.relays) == MOST_RELAYS


def test_a_peer_that_was_evicted_hears_why_whenever_it_asks() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    desk.lose(3)
    desk.wait(60)
    desk.silent.discard(3)
    desk.say(3, "here again", view=1)
    desk.poll(3)
    assert "its connection was closed" in desk.news[3].out
    desk.wait(60)
    assert desk.members == [1, 2]


def test_a_peer_that_leaves_hears_that_it_is_out() -> None:
    """Also where it waits for news at that moment, and is forgotten with the answer."""
    desk = Desk()
    desk.begin(1, 2)
    desk.leave(2)
    assert "it left" in desk.news[2].out
    assert 2 not in desk.rule.workers


def test_a_peer_that_is_told_to_report_again_is_known_again() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk.here(3)
    desk.lose(3)
    desk.wait(1)
    assert 3 not in desk.rule.workers
    desk.back(3)
    desk.ready(3)
    assert desk.members == [1, 2, 3]


# -- started again -----------------------------------------------------------------------------------------------------


def again(desk: Desk, *missing: int) -> Desk:
    """The same run after its coordinator was started again; `missing` are not heard any more."""
    other = Desk(desk.journal)
    other.known, other.news = dict(desk.known), dict(desk.news)
    other.silent = desk.silent | set(missing)
    other.wait(0.1)
    return other


def test_started_again_it_changes_nothing_while_all_are_there() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    other = again(desk)
    other.wait(60)
    assert (other.view.number, other.members) == (1, [1, 2, 3])
    assert all(news.view == desk.view.text() for news in other.news.values())
    other.here(4)
    other.ready(4)
    assert (other.view.number, other.members) == (2, [1, 2, 3, 4])


def test_a_newcomer_is_told_with_how_many_the_run_began() -> None:
    """Also where others are there by now, and by a coordinator that was started again."""
    desk = Desk(initial=3, most=8)
    desk.begin(1, 2, 3)
    desk.here(4)
    assert desk.standing(4).began == 3
    desk.ready(4)
    desk.lose(1, 2)
    desk.wait(60)
    assert desk.members == [3, 4]
    desk.here(5)
    assert (desk.standing(5).began, desk.standing(5).size) == (3, 2)
    other = again(desk, 1, 2)
    other.here(6)
    assert other.standing(6).began == 3


def test_started_again_it_waits_for_members_before_it_judges_them() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    other = again(desk, 2, 3)
    other.wait(4)
    assert other.view.number == 1
    other.back(3)
    other.wait(60)
    assert (other.view.number, other.members) == (2, [1, 3])


def test_started_again_it_continues_with_a_view_that_was_over() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    desk.silent.add(3)
    desk.broken(1)
    assert desk.news[1].over == 1
    other = again(desk, 3)
    other.wait(60)
    assert (other.view.number, other.members) == (2, [1, 2])


def test_a_view_that_some_have_not_heard_of_is_followed_by_another() -> None:
    """Its secret is not in the journal."""
    desk = Desk()
    desk.begin(1, 2)
    desk.silent.add(2)
    before = desk.known[2]
    desk.broken(1)
    desk.known[2] = 3  # it has closed, and its answer is lost
    desk.silent.discard(2)
    desk.poll(2)
    assert desk.view.number == 2
    desk.known[2] = 3
    other = again(desk)
    other.wait(60)
    assert before == 2
    assert (other.view.number, other.members) == (3, [1, 2])
    assert other.news[1].read_view() == other.news[2].read_view()


def test_what_was_changed_is_remembered() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk.resize(3)
    desk.leave(2, finished=True)
    other = again(desk)
    assert (other.rule.most, other.rule.finishing, other.members) == (3, True, [1])
    assert other.rule.fingerprint == desk.rule.fingerprint


def test_a_coordinator_that_lost_its_journal_ends_the_run() -> None:
    desk = Desk()
    desk.begin(1, 2)
    other = Desk()
    other.known, other.news = dict(desk.known), dict(desk.news)
    other.wait(1)
    assert "journal ends with view 0" in other.rule.ended
    assert all(news.out == other.rule.ended for news in other.news.values())


# -- what nobody should send -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "about"),
    [
        ("vote", ""),
        ("here", "[" * 100_000),
        ("here", '{"number": true, "host": "h", "port": 1, "place": 0}'),
        ("here", '{"number": 9, "host": "h", "port": 70000, "place": 0}'),
        ("here", '{"number": 9, "host": "h", "port": 7, "place": 0, "root": true}'),
        ("broken", '{"view": 1, "suspects": ["1"], "why": ""}'),
        ("attached", '{"number": 1, "host": "h", "port": 1, "place": 0}'),
        ("parameters", None),
        (f"{NEWS}/x", None),
        (f"{NEWS}/-1", None),
        (f"{NEWS}/1/x", None),
        (f"{NEWS}/1/2/3", None),
        (f"{NEWS}/1/{'9' * 5000}", None),
        (f"{NEWS}/{'9' * 5000}", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_malformed_is_refused_and_changes_nothing(key: str, about: str | None) -> None:
    desk = Desk()
    op = Pull(of=COORDINATOR, key=key)
    if about is not None:
        op = Push(to=COORDINATOR, key=key, stamp=Stamp(1, 0), about=about)
    desk.here(1, 2)
    (reply,) = desk.coordinator.react(Arrived(moment=0.0, token=10**6, sender=Peer(WORKER, 1), op=op))
    assert isinstance(reply.answer, Receipt if isinstance(op, Push) else Pulled)
    assert reply.answer.version == -1
    assert Standing.of(reply.answer.about).refused
    assert desk.members == [1, 2]
    assert not desk.rule.fingerprint


def test_no_message_stops_it() -> None:
    """Reports with characters changed, and cut off."""
    draw, desk = random.Random(0), Desk(initial=8)
    desk.here(1)
    for token in range(10**6, 10**6 + 2000):
        report = bytearray(b'{"number": 9, "host": "h", "port": 1, "place": 0, "view": 0, "ready": true}')
        for _ in range(draw.randint(1, 4)):
            report[draw.randrange(len(report))] = draw.randrange(128)
        text = report.decode("ascii")[: draw.choice((None, draw.randrange(90)))]
        key = draw.choice(("here", "ready", "attached", "here again", "broken"))
        op = Push(to=COORDINATOR, key=key, stamp=Stamp(9, 0), about=text)
        desk.coordinator.react(Arrived(moment=0.0, token=token, sender=Peer(WORKER, 9), op=op))
    assert desk.status(1).endswith("of 8 workers are connected")


# -- first machine -----------------------------------------------------------------------------------------------------

# The first machine of an elastic run dies, with its coordinator, and is started again: in virtual time.
#
# Machine 0 is the coordinator's. Its workers end with the coordinator; those of the other machines survive.


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


# -- networks ----------------------------------------------------------------------------------------------------------

# Coordinator and members in virtual time, on bad networks: invariants of views and of what is completed in them.


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_promise_20_views_and_histories_are_one(block: range) -> None:
    for seed in block:
        with replayed(seed, "views_and_histories_are_one"):
            check(ElasticRun(seed).go())


class CutOff(ElasticRun):
    """Four workers, of which at least two train. For some seconds the network is cut: machine 0 and the coordinator are
    on one side, or the coordinator and the first three."""

    def __init__(self, seed: int, near: Sequence[int]) -> None:
        super().__init__(seed)
        self.count, self.initial, self.least, self.most, self.transactions = 4, 4, 2, 4, 60
        self.machines = [Machine(each, self, 0.0) for each in range(4)]
        self._near = near

    def resizing(self) -> PeerScript:
        yield from ()

    def network(self) -> VirtualNetwork:
        near = [COORDINATOR, *(Peer(role, each) for role in ROLES for each in self._near)]
        far = [Peer(role, each) for role in ROLES for each in range(4) if each not in self._near]
        heals = 9.0 + self.random.uniform(0, 4)
        return replace(super().network(), loss=0.0, faults=(Cut(tuple(near), tuple(far), 4.0, heals),))


@pytest.mark.parametrize(("near", "again"), [((0,), set()), ((0, 1, 2), {3})])
def test_who_trained_nowhere_while_the_network_was_cut_is_not_evicted_when_it_heals(
    near: tuple[int, ...], again: set[int]
) -> None:
    for seed in range(10):
        run = CutOff(seed, near).go()
        check(run)
        assert {each.number for each in run.machines if len(each.processes) > 1} == again, (seed, run.notes)


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_rules_are_found_out(twin: str) -> None:
    assert any(caught(twin, seed) for seed in range(50))


def test_the_program_names_what_it_went_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "5", "--twin-seeds", "30"])
    assert membership_seeds.main() == 0
    said = capsys.readouterr().out
    assert "5 seeds from 0 on" in said
    assert all(f"| {name} | 0 |" in said for name in INVARIANTS)
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "0", "--twin-seeds", "0"])
    assert membership_seeds.main() == 1


def test_runs_are_the_same_again() -> None:
    first, second = (ElasticRun(457).go() for _ in range(2))
    assert first.notes == second.notes
    assert [each.entries for each in first.processes] == [each.entries for each in second.processes]
    assert first.trace == second.trace


# -- four workers and their coordinator, cut into two sides that both live ---------------------------------------------


WORKERS_PARTITIONS = 4
CUT, HEALED = 4.0, 12.0  # seconds
SEEDS_PARTITIONS = range(8)


class PartitionedRun(ElasticRun):
    """Everybody is there from the beginning, nobody dies, and some are cut off from the coordinator and the rest."""

    def __init__(self, seed: int, cut_off: Sequence[int], one_way: bool = False) -> None:
        super().__init__(seed)
        self.cut_off, self._one_way = cut_off, one_way
        self.count = self.initial = self.most = WORKERS_PARTITIONS
        self.least, self.transactions = 2, 90
        self.machines = [Machine(each, self, 0.0) for each in range(WORKERS_PARTITIONS)]

    def resizing(self) -> PeerScript:
        yield from compute(0.0)

    def network(self) -> VirtualNetwork:
        away = tuple(Peer(WORKER, each) for each in self.cut_off)
        rest = tuple(Peer(WORKER, each) for each in range(WORKERS_PARTITIONS) if each not in self.cut_off)
        cut = Cut(away, (*rest, COORDINATOR), CUT, HEALED, one_way=self._one_way)
        return VirtualNetwork(
            round_trip_seconds=self.random.choice((0.002, 0.05)),
            jitter_seconds=self.random.choice((0.0, 0.01)),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            resend_seconds=0.2,
            faults=of_all_roles([cut]),
            links=within_machines(WORKERS_PARTITIONS),
        )

    def committed_by(self, numbers: set[int]) -> set[int]:
        """Transactions that were made in views of just these members."""
        return {step for process in self.processes for step, _, who in process.entries if set(who) == numbers}


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("cut_off", [[3], [0], [2, 3], [1, 2, 3]])
def test_promise_5_at_most_one_side_commits(cut_off: list[int], one_way: bool) -> None:
    """The side that the coordinator is on, where it has the least number of workers; else nobody."""
    for seed in SEEDS_PARTITIONS:
        with replayed(seed, "at_most_one_side_commits"):
            run = PartitionedRun(seed, cut_off, one_way)
            run.go()
            check(run)
            assert all(machine.process.is_done for machine in run.machines)
            assert not run.committed_by({each + 1 for each in cut_off})
            others = {each + 1 for each in range(WORKERS_PARTITIONS) if each not in cut_off}
            assert bool(run.committed_by(others)) == (len(others) >= run.least)


def test_the_check_detects_a_mutant_that_continues_without_the_others() -> None:
    class Alone(PartitionedRun):
        def __init__(self, seed: int) -> None:
            super().__init__(seed, [2, 3])
            self.process = Hasty

    committed = [Alone(seed).go().committed_by({3}) for seed in SEEDS_PARTITIONS]
    assert any(committed)
