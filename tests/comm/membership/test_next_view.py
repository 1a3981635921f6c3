"""View rule: when a view is over, and who is in the next one, moment by moment."""

from __future__ import annotations

import pytest
from support.coordinator_desk import Desk

from gossamer.comm.membership import next_view
from gossamer.comm.membership.messages import ALL_LEFT, ATTACHED
from gossamer.comm.membership.next_view import (
    LOSS_FORGOTTEN_SECONDS,
    TRIES,
    Accusation,
    AccusationRecord,
    LossHistory,
    ViewPolicy,
    least_connected,
)

# -- the first view ----------------------------------------------------------------------------------------------------


def test_the_run_begins_once_all_are_here_by_place() -> None:
    desk = Desk(initial=3)
    desk.here(2)
    desk.here(7, place=-1)
    assert desk.rule.view is None
    desk.here(1)
    assert desk.members == [1, 2, 7]
    assert desk.view.number == 1
    assert all(desk.news[worker].view == desk.view.text() for worker in desk.members)


def test_fewer_begin_after_a_patience_and_no_fewer_than_the_least() -> None:
    desk = Desk(initial=4, least=2)
    desk.here(1)
    desk.wait(100)
    assert desk.rule.view is None
    assert any("1 of 4 workers are connected" in note for note in desk.notes)
    desk.here(2)
    assert desk.members == [1, 2]


def test_a_peer_that_was_lost_before_the_run_does_not_count() -> None:
    desk = Desk()
    desk.here(1)
    desk.lose(1)
    desk.here(2)
    assert desk.rule.view is None
    desk.here(3)
    assert desk.members == [2, 3]


@pytest.mark.parametrize(("least", "initial", "most"), [(0, 1, 1), (3, 2, 4), (1, 5, 4)])
def test_numbers_that_do_not_go_together_are_refused(least: int, initial: int, most: int) -> None:
    with pytest.raises(ValueError, match="least <= initial <= most"):
        Desk(least=least, initial=initial, most=most)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_a_closed_connection_counts_at_once_unless_it_is_back() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    desk.lose(2)
    desk.wait(0.05)
    desk.back(2)
    desk.wait(20)
    assert (desk.view.number, desk.members) == (1, [1, 2, 3])
    desk.lose(2)
    desk.wait(0.11)
    assert (desk.view.number, desk.members) == (2, [1, 3])


def test_a_peer_that_does_not_close_is_out_after_so_many_seconds() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    desk.silent.add(2)
    desk.broken(1)
    desk.wait(4.9)
    assert desk.view.number == 1
    assert desk.rule.is_over
    desk.wait(0.2)
    assert desk.members == [1, 3]
    desk.back(2)
    assert "did not answer for 5 s" in desk.news[2].out


def test_a_false_alarm_is_followed_by_the_same_members() -> None:
    desk = Desk()
    secret = desk.begin(1, 2).secret
    desk.broken(2)
    assert (desk.view.number, desk.members) == (2, [1, 2])
    assert desk.view.secret != secret
    desk.broken(1, view=1)  # late
    assert desk.view.number == 2


def test_below_the_least_all_wait_and_are_told() -> None:
    desk = Desk(initial=3, least=2)
    desk.begin(1, 2, 3)
    desk.lose(1, 2)
    desk.wait(30)
    assert desk.view.number == 1
    assert any("waiting for 11 s: 1 more workers are needed" in note for note in desk.notes)
    assert "1 of 3 workers have closed view 1; 2 are needed" in desk.status(3)
    desk.here(4)
    desk.wait(30)
    assert desk.view.number == 1
    desk.ready(4)
    assert (desk.view.number, desk.members, desk.view.newcomers) == (2, [3, 4], {4})


def test_a_member_that_comes_back_before_the_next_view_is_made_is_in_it() -> None:
    desk = Desk(least=2)
    desk.begin(1, 2)
    desk.lose(2)
    desk.wait(30)
    desk.back(2)
    assert (desk.view.number, desk.members) == (2, [1, 2])


class Impatient(ViewPolicy):
    """Goes on as soon as enough are heard."""

    def _excuse_silence(self, now: float) -> None: ...


def cut_off(rule: type[ViewPolicy] = ViewPolicy) -> Desk:
    """Three of four cannot be heard, and the one that can is too few."""
    desk = Desk(initial=4, least=2, rule=rule)
    desk.begin(1, 2, 3, 4)
    desk.lose(2, 3, 4)
    desk.wait(30)
    assert (desk.view.number, desk.rule.is_over) == (1, True)
    return desk


def healed(rule: type[ViewPolicy]) -> list[int]:
    """A cut heals, and those behind it are back one after the other."""
    desk = cut_off(rule)
    for worker in (3, 2, 4):
        desk.back(worker)
        desk.wait(1)
    return desk.members


def test_when_a_cut_heals_nobody_is_put_out_for_being_back_a_moment_later() -> None:
    assert healed(ViewPolicy) == [1, 2, 3, 4]
    assert healed(Impatient) == [1, 3]


def test_those_behind_a_cut_are_waited_for_once_and_no_longer_than_for_a_sign_of_life() -> None:
    desk = cut_off()
    desk.back(3)
    desk.wait(2)
    desk.lose(3)
    desk.wait(2)
    desk.back(3)
    desk.wait(0.9)
    assert desk.view.number == 1
    desk.wait(0.2)
    assert desk.members == [1, 3]


def test_nobody_waits_for_who_cannot_come_back() -> None:
    desk = cut_off()
    desk.gone(2)
    desk.leave(4)
    desk.back(3)
    assert desk.members == [1, 3]


def test_a_stop_of_the_coordinator_costs_nobody_its_place() -> None:
    """All connections close while it is stopped; they come back soon."""

    def stopped(rule: type[ViewPolicy]) -> Desk:
        desk = Desk(initial=3, rule=rule)
        desk.begin(1, 2, 3)
        desk.now += 60
        desk.lose(1, 2, 3)
        desk.wait(0.5)
        desk.back(2)
        desk.wait(0.5)
        desk.back(1)
        desk.back(3)
        desk.wait(30)
        return desk

    class Vain(ViewPolicy):
        """Takes its own absence for that of others."""

        def look_at_clock(self, now: float) -> None:
            self.now = now

    assert stopped(ViewPolicy).view.number == 1
    assert stopped(Vain).view.number > 1


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_run_is_over_once_nobody_has_the_parameters() -> None:
    desk = Desk()
    desk.begin(1, 2)
    desk.here(3)
    desk.ready(3)
    assert desk.view.newcomers == {3}
    desk.gone(1, 2)
    assert "no worker with the parameters is left" in desk.rule.ended
    assert "no worker with the parameters" in desk.news[3].out
    assert desk.journal.load().ended == desk.rule.ended


def test_a_newcomer_that_has_caught_up_carries_the_run_on() -> None:
    desk = Desk(initial=1)
    desk.begin(1)
    desk.here(2)
    desk.ready(2)
    desk.caught_up(2)
    desk.gone(1)
    assert (desk.members, desk.view.newcomers, desk.rule.ended) == ([2], frozenset(), "")


def test_a_peer_that_has_the_parameters_may_come_back_for_a_while() -> None:
    desk = Desk(initial=1, end_after_seconds=50.0)
    desk.begin(1)
    desk.lose(1)
    desk.wait(40)
    desk.back(1)
    assert (desk.view.number, desk.rule.ended) == (2, "")
    desk.lose(1)
    desk.wait(60)
    assert "reachable for 50 s" in desk.rule.ended


def test_those_behind_finish_in_a_view_below_the_least() -> None:
    for finished in (False, True):
        desk = Desk(least=2)
        desk.begin(1, 2)
        desk.leave(1, finished)
        desk.wait(5)
        assert desk.view.number == (2 if finished else 1)
    desk.leave(2, finished=True)
    assert desk.rule.ended == "all workers that had the parameters have left"


# -- newcomers ---------------------------------------------------------------------------------------------------------


def test_newcomers_wait_for_room_and_for_those_before_them() -> None:
    desk = Desk(most=4)
    desk.begin(1, 2)
    desk.here(3, 4, 5)
    desk.ready(5)
    assert (desk.members, desk.view.newcomers) == ([1, 2, 5], {5})
    desk.ready(4)
    assert desk.members == [1, 2, 5]
    desk.caught_up(5)
    assert (desk.members, desk.view.newcomers) == ([1, 2, 5, 4], {4})
    desk.caught_up(4)
    desk.ready(3)
    assert desk.view.world == 4
    assert desk.status(3) == "all 4 places are taken. Add one with `gossamer resize 5`"
    desk.lose(1)
    desk.wait(1)
    assert desk.members == [2, 5, 4, 3]


def test_a_newcomer_rides_along_with_a_loss() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    desk.here(4)
    desk.silent.add(3)
    desk.broken(1)
    desk.ready(4)
    desk.wait(6)
    assert (desk.view.number, desk.members) == (2, [1, 2, 4])


def test_a_newcomer_is_compared_once_it_is_known_what_it_must_be_like() -> None:
    desk = Desk()
    desk.here(1, 2)
    desk.here(3)
    desk.ready(3, fingerprint='{"torch": "2.12.0"}')
    assert "fingerprint" in desk.status(3)
    desk.say(1, "attached", fingerprint='{"torch": "2.13.0"}', view=1)
    assert "torch: '2.13.0' in the run, '2.12.0' here" in desk.standing(3).refused
    desk.wait(60)
    assert desk.view.number == 1


def test_a_place_whose_workers_are_lost_again_and_again_waits_longer_and_longer() -> None:
    desk = Desk()
    desk.begin(1, 2)
    waits = []
    for worker in (10, 11, 12, 13, 14, 15, 16, 17):
        desk.here(worker, place=9)
        desk.ready(worker)
        began = desk.now
        while worker not in desk.members and desk.now < began + 100:
            desk.wait(0.25)
        waits.append(round(desk.now - began))
        desk.gone(worker)
    assert waits == [0, 0, 1, 2, 4, 8, 16, 30]
    assert any("3 workers of its slot were lost in a row; it is admitted in 2.0 s" in note for note in desk.notes)


def test_resizing_puts_the_newest_out_and_keeps_who_has_the_parameters() -> None:
    desk = Desk(initial=3, least=1)
    desk.begin(1, 2, 3)
    desk.here(4)
    desk.ready(4)
    assert desk.resize(0).startswith("refused")
    assert desk.resize(3) == "at most 3 workers from now on (before: 8); the newest 1 of 4 are evicted"
    assert desk.members == [1, 2, 3]
    assert "resized to 3 workers" in desk.news[4].out
    desk.resize(1)
    assert desk.members == [1]


# -- members that live and cannot go on --------------------------------------------------------------------------------


def test_a_peer_that_is_named_by_others_again_and_again_is_out() -> None:
    desk = Desk(initial=4)
    desk.begin(1, 2, 3, 4)
    for accuser in (1, 3, 4):
        assert desk.members == [1, 2, 3, 4]
        desk.broken(accuser, 2)
        desk.wait(3)
    assert desk.members == [1, 3, 4]
    assert "fewest connections" in desk.news[2].out


def test_of_two_that_accuse_each_other_the_one_that_came_last_goes() -> None:
    desk = Desk(initial=4)
    desk.begin(1, 2, 3, 4)
    for _ in range(3):
        desk.broken(2, 3)
        desk.broken(3, 2)
        desk.wait(3)
    assert desk.members == [1, 2, 4]


def test_views_in_which_something_was_completed_explain_themselves() -> None:
    desk = Desk(initial=3)
    desk.begin(1, 2, 3)
    for _ in range(8):
        desk.broken(1, 2, went_on=True)
        desk.wait(3)
    assert desk.members == [1, 2, 3]


def test_views_that_break_at_once_follow_each_other_slower_and_slower() -> None:
    desk = Desk()
    desk.begin(1, 2)
    for _ in range(60):
        desk.broken(1)
        desk.wait(0.1)
    assert 5 < desk.view.number < 14
    assert desk.members == [1, 2]


def test_nobody_is_put_out_where_too_few_would_be_left() -> None:
    desk = Desk(least=2)
    desk.begin(1, 2)
    for _ in range(5):
        desk.broken(1, 2)
        desk.wait(3)
    assert desk.members == [1, 2]


# -- literal tables of who is put out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "accusations", "out"),
    [
        ([1, 2, 3], [], None),
        ([1, 2, 3], [(1, 9)], None),  # of somebody who is lost
        ([1, 2, 3], [(1, 1)], None),
        ([1, 2, 3], [(1, 2)], 2),
        ([3, 2, 1], [(1, 2)], 1),  # the order is that in which they came
        ([1, 2, 3], [(3, 1), (2, 1)], 1),
        ([1, 2, 3, 4], [(1, 2), (1, 3), (1, 4)], 1),  # who accuses all is itself connected to nobody
        ([1, 2, 3, 4], [(1, 2), (2, 1), (3, 4)], 4),
        ([5, 1], [(1, 5), (5, 1)], 1),
    ],
)
def test_a_peer_that_is_connected_to_the_fewest_goes(
    members: list[int], accusations: list[Accusation], out: int | None
) -> None:
    assert least_connected(members, accusations) == out
    assert least_connected(members, accusations[::-1]) == out


def test_nobody_is_put_out_before_so_many_views_broke_in_a_row() -> None:
    record = AccusationRecord()
    for _ in range(TRIES - 1):
        record.broke({(1, 2)}, explained=False, went_on=False, seconds=1.0)
        assert record.blamed([1, 2]) is None
    record.broke({(2, 1)}, explained=False, went_on=False, seconds=1.0)
    assert record.blamed([1, 2]) == 2


@pytest.mark.parametrize(
    "between",
    [
        {"explained": True, "went_on": False, "seconds": 1.0},
        {"explained": False, "went_on": True, "seconds": 1.0},
        {"explained": False, "went_on": False, "seconds": 601.0},
    ],
)
def test_what_explains_a_broken_view_clears_everybody(between: dict[str, float]) -> None:
    record = AccusationRecord()
    for _ in range(TRIES - 1):
        record.broke({(1, 2)}, explained=False, went_on=False, seconds=1.0)
    record.broke({(1, 2)}, **between)  # type: ignore[arg-type]
    record.broke({(1, 2)}, explained=False, went_on=False, seconds=1.0)
    assert record.blamed([1, 2]) is None


def test_a_view_that_broke_without_a_name_puts_nobody_out() -> None:
    record = AccusationRecord()
    for accusations in ({(1, 2)}, set[Accusation](), {(1, 2)}):
        record.broke(accusations, explained=False, went_on=False, seconds=1.0)
    assert record.blamed([1, 2]) is None


def test_pauses_double_up_to_a_bound() -> None:
    record, pauses = AccusationRecord(), []
    for _ in range(8):
        record.broke(set(), explained=False, went_on=False, seconds=0.0)
        pauses.append(record.pause_seconds())
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


# -- a literal table of waits ------------------------------------------------------------------------------------------


def test_waits_double_up_to_a_bound_and_are_forgotten() -> None:
    history, now, waits = LossHistory(), 0.0, []
    for _ in range(8):
        history.lost("here", now)
        waits.append(history.opens_at("here") - now)
        now += 10.0
    assert waits == [-float("inf"), 1, 2, 4, 8, 16, 30, 30]
    assert history.opens_at("there") == float("-inf")
    history.lost("here", now + LOSS_FORGOTTEN_SECONDS)
    assert history.count("here") == 1


# -- the places of a view when newcomers, losses, leaves and resizes come together -------------------------------------


def test_of_two_newcomers_ready_at_once_one_place_takes_the_first() -> None:
    desk = Desk(initial=3, most=3)
    desk.begin(1, 2, 3)
    desk.here(4, 5)
    desk.ready(4, 5)
    assert desk.members == [1, 2, 3]
    desk.gone(3)
    desk.wait(1)
    assert (desk.view.number, desk.members) == (2, [1, 2, 4])
    assert not desk.news[5].out, "it was never taken in, so it may come later"


def test_a_resize_keeps_the_only_member_that_has_the_parameters() -> None:
    """Members 3 and 4 come in together; only member 4 has the parameters when the member before them is lost."""
    desk = Desk(initial=2, most=4)
    desk.begin(1, 2)
    desk.here(3, 4)
    desk.silent.add(2)
    desk.broken(1)
    desk.ready(3, 4)
    desk.wait(6)
    assert (desk.members, desk.view.newcomers) == ([1, 3, 4], {3, 4})
    desk.caught_up(4)
    desk.gone(1)
    desk.resize(1)
    desk.wait(1)
    assert desk.members == [4], "member 3, which is before member 4, has no parameters"


def test_a_worker_that_leaves_is_no_loss_of_its_place() -> None:
    desk = Desk(initial=3, least=1)
    desk.begin(1, 2, 3)
    desk.gone(3)
    desk.wait(0.2)
    desk.here(13, place=3)
    desk.ready(13)
    assert desk.members == [1, 2, 13], "a single loss does not delay its place"
    desk.caught_up(13)
    desk.leave(13)
    desk.gone(13)
    desk.wait(0.2)
    assert desk.members == [1, 2]
    desk.here(23, place=3)
    desk.ready(23)
    assert desk.members == [1, 2, 23], "let in at once"
    desk.gone(23)
    desk.wait(0.5)
    desk.here(33, place=3)
    desk.ready(33)
    assert desk.members == [1, 2], "a second loss waits for a second"


# -- a run with servers, which have the parameters ---------------------------------------------------------------------


def test_with_servers_newcomers_come_after_the_loss_of_all_members() -> None:
    desk = Desk(servers=("10.0.0.4:40211",))
    desk.begin(1, 2)
    desk.gone(1, 2)
    desk.wait(400)
    assert not desk.rule.ended
    assert any("no worker is left, and the servers have the parameters" in note for note in desk.notes)
    desk.here(3)
    desk.ready(3)
    assert desk.members == [3]


def test_with_servers_no_newcomer_waits_for_the_one_before() -> None:
    desk = Desk(servers=("10.0.0.4:40211",))
    desk.begin(1, 2)
    for worker in (3, 4):
        desk.here(worker)
        desk.ready(worker)
    assert desk.members == [1, 2, 3, 4]


def test_with_servers_the_members_of_the_first_view_are_compared() -> None:
    desk = Desk(servers=("10.0.0.4:40211",))
    desk.begin(1, 2)
    desk.say(2, ATTACHED, fingerprint='{"torch": "1.0"}', view=1)
    assert "torch: '2.13.0' in the run, '1.0' here" in desk.standing(2).refused
    assert not desk.standing(1).refused


def test_with_servers_the_run_ends_once_all_have_left() -> None:
    desk = Desk(servers=("10.0.0.4:40211",))
    desk.begin(1, 2)
    desk.leave(1)
    desk.leave(2)
    desk.wait(1)
    assert desk.rule.ended == ALL_LEFT


def test_reasons_of_evictions_are_bounded_and_an_older_one_is_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_view, "MOST_OUTS", 2)
    desk = Desk(initial=5, least=1)
    desk.begin(1, 2, 3, 4, 5)
    for worker in (2, 3, 4):
        desk.lose(worker)
        desk.wait(6)
    assert (desk.members, list(desk.rule.outs)) == ([1, 5], [3, 4])
    desk.back(2)
    assert "unreachable" in desk.news[2].out


def test_a_message_names_a_few_of_many_changes() -> None:
    desk = Desk(initial=1, most=20)
    desk.begin(1)
    desk.here(*range(2, 15))
    desk.ready(*range(2, 15))
    assert desk.members == [1, 2]
    desk.caught_up(2)
    assert desk.members == list(range(1, 15))
    assert desk.notes[-1].count("joins") == next_view.MOST_NAMED
    assert desk.notes[-1].endswith("4 more changes")
