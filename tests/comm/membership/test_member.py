"""Member: what it closes and when, and what it takes for news."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.base.peer_ops import PeerScript, Pull, Pulled, Push, Receipt
from gossamer.comm.membership.member import MemberScripts
from gossamer.comm.membership.messages import (
    OUT_VERSION,
    BrokenReport,
    News,
    Standing,
    WorkerReport,
    version_of,
)
from gossamer.comm.membership.view import Member, View
from gossamer.errors import MalformedError

REPORT = WorkerReport(number=7, host="h", port=1, place=-1)


def view_of(number: int, *newcomers: int) -> View:
    members = tuple(Member(number=each, host="h", port=1) for each in (6, 7))
    return View(number=number, members=members, newcomers=frozenset(newcomers), secret=bytes(32))


def tell(script: PeerScript, version: int, news: News) -> Any:
    return script.send(Pulled(version=version, about=news.text()))


def test_a_view_is_closed_before_the_coordinator_hears_so_and_once() -> None:
    closed: list[int] = []
    member = MemberScripts(REPORT, closed.append)
    script = member.follow()
    assert next(script).known == -1
    assert tell(script, version_of(1, False), News(view=view_of(1).text())).known == 2
    assert (member.view, closed) == (view_of(1), [])
    assert tell(script, version_of(1, True), News(over=1)).known == 3
    assert closed == [1]
    assert tell(script, version_of(1, True), News(over=1)).known == 3  # twice
    assert tell(script, version_of(2, True), News(over=2)).known == 5  # it never heard of view 2
    assert tell(script, version_of(3, False), News(view=view_of(3).text())).known == 6
    assert closed == [1]
    with pytest.raises(StopIteration):
        tell(script, OUT_VERSION, News(out="it was put out"))
    assert (closed, member.out) == ([1, 3], "it was put out")


def test_a_newcomer_has_no_state_before_it_reports_it() -> None:
    member = MemberScripts(REPORT)
    script = member.follow()
    next(script)
    tell(script, version_of(4, False), News(view=view_of(4, 7).text()))
    assert (member.report.has_state, member.report.view) == (False, 4)
    tell(script, version_of(5, False), News(view=view_of(5).text()))
    assert member.report.has_state


def test_a_peer_that_is_asked_again_reports_all_and_continues() -> None:
    member = MemberScripts(REPORT)
    script = member.follow()
    next(script)
    member.learn(ready=True)
    report = tell(script, -1, News(again=True))
    assert isinstance(report, Push)
    assert WorkerReport.of(report.about) == member.report
    assert isinstance(script.send(Receipt(version=0, about=Standing(formed=False).text())), Pull)


def test_a_run_that_began_without_a_worker_that_was_there_is_reported() -> None:
    changes: list[str] = []
    member = MemberScripts(REPORT, on_change=lambda: changes.append(member.out))
    said = member.send_report("here")
    next(said)
    with pytest.raises(StopIteration):
        said.send(Receipt(version=0, about=Standing(formed=False).text()))
    script = member.follow()
    next(script)
    tell(script, -1, News(again=True))
    with pytest.raises(StopIteration):
        script.send(Receipt(version=0, about=Standing(formed=True, size=2).text()))
    assert changes == [member.out]
    assert "began without this worker" in member.out


def test_a_refusal_that_names_no_run_is_not_taken_for_another_runs() -> None:
    member = MemberScripts(REPORT)
    member.learn(run="a" * 32)
    said = member.send_report("here")
    next(said)
    with pytest.raises(StopIteration) as stop:
        said.send(Receipt(version=-1, about=Standing(refused="it has another model").text()))
    assert stop.value.value.refused == "it has another model"
    assert member.out == ""


def test_a_member_names_its_view_and_takes_a_change_of_it() -> None:
    member = MemberScripts(REPORT)
    script = member.follow()
    assert next(script).key == "news/7"
    assert tell(script, version_of(3, False), News(view=view_of(3).text())).key == "news/7/3"
    tell(script, version_of(3, True), News(over=3))
    change = view_of(4, 7).change_text(view_of(3))
    assert tell(script, version_of(4, False), News(change=change)).key == "news/7/4"
    assert member.view == view_of(4, 7)


def test_a_member_asks_for_the_whole_view_once_a_change_does_not_fit() -> None:
    member = MemberScripts(REPORT)
    script = member.follow()
    next(script)
    tell(script, version_of(3, False), News(view=view_of(3).text()))
    ask = tell(script, version_of(5, False), News(change=view_of(5).change_text(view_of(4))))
    assert (ask.key, ask.known) == ("news/7", 6)
    assert member.view == view_of(3)
    assert tell(script, version_of(5, False), News(view=view_of(5).text())).key == "news/7/5"
    assert member.view == view_of(5)


def test_a_change_for_a_worker_without_a_view_is_refused() -> None:
    script = MemberScripts(REPORT).follow()
    next(script)
    tell(script, version_of(4, False), News(change=view_of(4).change_text(view_of(3))))
    with pytest.raises(MalformedError, match="a worker that has none"):
        tell(script, version_of(4, False), News(change=view_of(4).change_text(view_of(3))))


@pytest.mark.parametrize(
    "message",
    [
        REPORT,
        WorkerReport(number=2**63 - 1, host="::1", port=65535, place=3, view=9, ready=True, fingerprint="{}"),
        BrokenReport(view=3, suspects=[1, 2**62], why="é", went_on=True),
        Standing(formed=True, size=3, most=5, refused="no"),
        News(view="x"),
        News(over=3),
        News(again=True),
    ],
)
def test_messages_are_read_as_they_were_written(message: Any) -> None:
    assert type(message).of(message.text()) == message
    with pytest.raises(MalformedError):
        type(message).of(message.text()[:-1])
    with pytest.raises(MalformedError):
        type(message).of(message.text().replace("{", '{"other": 1, ', 1))
