"""Many members: what a change costs, and that all agree after any number of changes, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from benchmarks.many_members_run import ManyMembers, Worker
from support.nightly import nightly

from gossamer.base.peer_ops import WORKER, Peer, PeerEvent, Reply
from gossamer.comm.membership import next_view
from gossamer.comm.membership.coordinator import Coordinator
from gossamer.comm.membership.known_worker import KnownWorkers, ReportedWorker
from gossamer.comm.membership.messages import WorkerReport
from gossamer.comm.membership.next_view import FREE_MEMBERS, NEWCOMERS_PACES
from gossamer.comm.membership.view import View

PATIENCE_SECONDS = 60.0
SIZES = SMALL, LARGE = 30, 120


def begun(count: int, seed: int = 0, **options: object) -> ManyMembers:
    """A run whose first view all members have, and have confirmed."""
    run = ManyMembers(count, seed, **options)  # type: ignore[arg-type]
    run.run(lambda: run.agreed, PATIENCE_SECONDS)
    run.run(seconds=1.0)
    assert run.rule.view is not None
    assert run.rule.view.world == count
    return run


def change(run: ManyMembers, act: Callable[[ManyMembers], object]) -> tuple[int, int]:
    """Messages and bytes from and to the coordinator until all agree after one change."""
    assert run.rule.view is not None
    before, messages, nbytes = run.rule.view.number, run.messages, run.bytes.total()
    act(run)
    run.run(lambda: run.rule.view is not None and run.rule.view.number > before and run.agreed, PATIENCE_SECONDS)
    assert run.rule.view.number == before + 1
    assert run.agreed
    return run.messages - messages, run.bytes.total() - nbytes


def join(run: ManyMembers) -> Worker:
    return run.arrive()


def lose(run: ManyMembers) -> None:
    run.lose(run.members[3])


@pytest.mark.parametrize(("act", "most"), [(join, 4), (lose, 5)])
def test_messages_of_a_change_are_proportional_to_the_members(act: Callable[[ManyMembers], object], most: int) -> None:
    """Each member hears that the view is over, confirms, and receives the next; a loss is reported by each as well."""
    for count in SIZES:
        messages, _ = change(begun(count), act)
        assert messages <= most * count + 10


@pytest.mark.parametrize("act", [join, lose])
def test_bytes_of_a_change_for_each_member_do_not_grow_with_their_number(
    act: Callable[[ManyMembers], object],
) -> None:
    each = {count: change(begun(count), act)[1] / count for count in SIZES}
    assert each[LARGE] < 1.2 * each[SMALL]


class Resends(Coordinator):
    """Sends the whole view to each member."""

    def _view_news(self, view: View, held: int) -> str:
        return super()._view_news(view, 0)


class Repeats(Coordinator):
    """Answers all members after every event."""

    def react(self, event: PeerEvent) -> list[Reply]:
        replies = super().react(event)
        for worker in self.rule.workers.values():
            replies += [Reply(token=token, answer=self._again(known)) for token, known, _ in worker.polls]
            worker.polls.clear()
        return replies


def test_the_bounds_exclude_coordinators_that_send_all_to_all() -> None:
    each = {count: change(begun(count, coordinator=Resends), join)[1] / count for count in SIZES}
    assert each[LARGE] > 2 * each[SMALL]
    run = begun(SMALL)
    run.coordinator.__class__ = Repeats
    assert change(run, join)[0] > 5 * SMALL + 10


def test_a_loss_and_a_join_cost_passes_over_the_members_not_one_for_each_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evidence and news are what passes over the members look at."""
    looks = Counter[str]()
    evidence, news = ReportedWorker.evidence, Coordinator._news

    def counted_evidence(worker: ReportedWorker, view: int, now: float, silent_at: float) -> str:
        looks["evidence"] += 1
        return evidence(worker, view, now, silent_at)

    def counted_news(coordinator: Coordinator, worker: ReportedWorker, held: int = 0) -> tuple[int, str]:
        looks["news"] += 1
        return news(coordinator, worker, held)

    monkeypatch.setattr(ReportedWorker, "evidence", counted_evidence)
    monkeypatch.setattr(Coordinator, "_news", counted_news)
    run = begun(LARGE)
    looks.clear()
    change(run, lose)
    change(run, join)
    assert max(looks.values()) < 2 * 10 * LARGE


@pytest.mark.parametrize("seed", [0, 1, *nightly(*range(2, 20))])
def test_all_members_end_in_one_view_after_churn(seed: int) -> None:
    run = begun(30, seed)
    run.churn(per_minute=10.0, seconds=10.0)  # five losses and five arrivals a second
    run.run(seconds=10.0)
    run.run(lambda: settled(run), PATIENCE_SECONDS)
    assert settled(run), run.notes[-3:]
    assert len({each.scripts.view.digest for each in run.members if each.scripts.view}) == 1
    assert len(run.members) == sum(each.is_alive for each in run.workers.values())
    assert not run.rule.workers.lost
    assert len(run.rule.workers) == len(run.members)
    assert not any(each.asked for each in run.members if len(each.asked) > 1), "a request other than the poll waits"


def settled(run: ManyMembers) -> bool:
    """Whether every living worker is in the newest view, and has received it."""
    alive = sum(each.is_alive for each in run.workers.values())
    return run.agreed and run.rule.view is not None and run.rule.view.world == alive


def test_every_view_is_the_same_for_all_that_received_it() -> None:
    run = begun(20, seed=3)
    seen: dict[int, str] = {}
    taken = run._on_change

    def compare(worker: Worker) -> None:
        taken(worker)
        if worker.scripts.view is not None:
            assert seen.setdefault(worker.scripts.view.number, worker.scripts.view.text()) == worker.scripts.view.text()

    run._on_change = compare  # type: ignore[method-assign]
    run.churn(per_minute=10.0, seconds=5.0)
    run.run(seconds=20.0)
    assert len(seen) > 5


def test_changes_that_come_together_share_a_view() -> None:
    run = begun(100)
    assert run.rule.view is not None
    before = run.rule.view.number
    for worker in run.members[:10]:
        run.lose(worker)
    for _ in range(10):
        run.arrive()
    run.run(lambda: settled(run), PATIENCE_SECONDS)
    assert run.rule.view.number <= before + 2
    assert run.rule.view.world == 100


def test_large_views_follow_each_other_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_view, "SECONDS_A_MEMBER", 0.02)
    run = begun(FREE_MEMBERS + 30)
    first, began = run.rule._view_since, run.now
    run.lose(run.members[3])
    run.run(lambda: run.rule._view_since > first, PATIENCE_SECONDS)
    assert run.now < began + 0.5  # after a view that has lasted, the next one waits for the members only
    since = run.rule._view_since
    run.run(lambda: run.agreed, PATIENCE_SECONDS)  # so that members report the broken view at once
    run.lose(run.members[3])
    run.run(lambda: run.rule._view_since > since, PATIENCE_SECONDS)
    assert since + 0.58 <= run.now < since + 0.7


def test_small_views_follow_each_other_without_a_pause() -> None:
    run = begun(30)
    assert run.rule._next_view_from() == run.rule._next_view_from(NEWCOMERS_PACES) == run.rule._view_since


def seconds_until_admitted(run: ManyMembers, act: Callable[[], object]) -> float:
    """From the newest view until a newcomer of this moment is in one."""
    since, newcomer = run.rule._view_since, run.arrive()
    act()
    run.run(lambda: run.rule.view is not None and run.rule.view.holds(newcomer.number), PATIENCE_SECONDS)
    return run.rule._view_since - since


def test_newcomers_of_a_large_view_wait_for_a_loss_or_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_view, "SECONDS_A_MEMBER", 0.05)  # a pace of 1.5 s
    run = begun(FREE_MEMBERS + 30)
    run.run(seconds=10.0)
    began = run.now
    first = run.arrive()
    run.run(lambda: run.rule.view is not None and run.rule.view.holds(first.number), PATIENCE_SECONDS)
    assert run.now < began + 0.5  # the first newcomer after a quiet time does not wait
    assert NEWCOMERS_PACES * 1.5 <= seconds_until_admitted(run, lambda: None) < NEWCOMERS_PACES * 1.6 + 0.5
    assert 1.5 <= seconds_until_admitted(run, lambda: run.after(1.0, lambda: run.lose(run.members[3]))) < 2.2


def ended_without_a_loss(run: ManyMembers, seconds: float) -> int:
    """Views that newcomers alone have ended, while members are lost and started."""
    ended, seen = 0, run.rule.view
    run.churn(per_minute=2.0, seconds=seconds)
    until = run.now + seconds
    while run.now < until:
        run.run(seconds=0.05)  # shorter than any view
        if seen is not None and run.rule.view is not None and run.rule.view is not seen:
            ended += set(seen.numbers) <= set(run.rule.view.numbers)
        seen = run.rule.view
    return ended


def test_under_churn_views_end_by_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss every 0.3 s, and a pace of 0.3 s. Negative control: newcomers end views as soon as losses may."""
    monkeypatch.setattr(next_view, "SECONDS_A_MEMBER", 0.01)
    waits = ended_without_a_loss(begun(FREE_MEMBERS + 30), 10.0)
    monkeypatch.setattr(next_view, "NEWCOMERS_PACES", 1.0)
    assert 2 * waits < ended_without_a_loss(begun(FREE_MEMBERS + 30), 10.0)


def test_known_workers_are_lost_at_their_deadline_unless_they_reconnect() -> None:
    known = KnownWorkers()
    one, other = (ReportedWorker(WorkerReport(number=each, host="h", port=1, place=-1)) for each in (1, 2))
    for worker in (one, other):
        known.add(worker)
        known.reconnect(worker, Peer(WORKER, worker.number))
        known.close(worker, 5.0)
    known.reconnect(one, Peer(WORKER, 1))
    known.close(one, 7.0)
    assert known.next_deadline == 5.0
    known.look(6.0)
    assert list(known.lost) == [2]
    known.reconnect(other, Peer(WORKER, 2))
    known.look(8.0)
    assert list(known.lost) == [1]
    assert (known.connected, known.of_peer(Peer(WORKER, 2))) == (1, [other])
    known.forget(other)
    assert (known.connected, known.of_peer(Peer(WORKER, 2)), list(known)) == (0, [], [1])
