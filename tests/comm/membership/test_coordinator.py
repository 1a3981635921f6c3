"""Coordinator: what it answers to whom, also after it was started again, and to messages that nobody should send."""

from __future__ import annotations

import random

import pytest
from support.coordinator_desk import Desk

from gossamer.base.peer_ops import WORKER, Arrived, Peer, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.membership.messages import COORDINATOR, NEWS, Standing


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


def test_who_was_put_out_hears_why_whenever_it_asks() -> None:
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


def test_who_leaves_hears_that_it_is_out() -> None:
    """Also where it waits for news at that moment, and is forgotten with the answer."""
    desk = Desk()
    desk.begin(1, 2)
    desk.leave(2)
    assert "it left" in desk.news[2].out
    assert 2 not in desk.rule.workers


def test_who_is_told_to_report_again_is_known_again() -> None:
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


def test_started_again_it_goes_on_with_a_view_that_was_over() -> None:
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
