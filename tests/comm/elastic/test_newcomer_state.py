"""Admission: groups of views that have ended are closed, and polls are not more frequent than a copy needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.comm.elastic.newcomer_state import LONGEST_PAUSE, Admission, BackgroundCopy, slowest_line
from gossamer.comm.membership.view import Member, View
from gossamer.comm.mesh.link_measurement import Links
from gossamer.errors import PeerLost

MEMBERS = tuple(Member(number=number, host="h", port=1) for number in (7, 8))
VIEW = View(number=3, members=MEMBERS, newcomers=frozenset({8}), secret=bytes(32))


class Group:
    """A group of a member and a newcomer, on links of 8 Mbit/s."""

    rank, world, closed = 0, 2, False
    links = Links.alike(((0.0,) * 2,) * 2, 8e6).text

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("number", [3, 4])
def test_a_group_is_closed_if_its_view_ends_while_it_is_formed(number: int) -> None:
    group = Group()

    def connect(view: View) -> Any:
        admission.abandon(number)
        return group

    admission = Admission(SimpleNamespace(number=7), connect, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match="another view"):
        admission._formed(VIEW)
    assert group.closed


def test_a_group_is_closed_if_its_view_ends_afterwards() -> None:
    group = Group()
    admission = Admission(SimpleNamespace(number=7), lambda view: group, 1.0)  # type: ignore
    assert admission._formed(VIEW) is group
    admission.abandon(2)
    assert not group.closed
    admission.abandon(3)
    assert group.closed
    with pytest.raises(PeerLost, match="another view"):
        admission._take_group(group)  # type: ignore[arg-type]


def test_a_group_that_training_uses_is_not_closed() -> None:
    group = Group()
    admission = Admission(SimpleNamespace(number=7), lambda view: group, 1.0)  # type: ignore
    admission._take_group(admission._formed(VIEW))
    admission.abandon(3)
    assert not group.closed


def test_polls_pause_for_half_of_the_expected_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gossamer.comm.elastic.newcomer_state.time.monotonic", lambda: now[0])
    copy = BackgroundCopy(Group, receivers=1, began_at=10)  # type: ignore[arg-type]
    copy._seconds = 21.0
    now[0] = 101.0  # ten transactions per second, 20 s are left
    assert copy.pause(completed=12) == 20
    assert copy.pause(completed=1010) == LONGEST_PAUSE
    now[0] = 150.0
    assert copy.pause(completed=1010) == 1


def test_the_slowest_line_is_that_of_a_newcomer() -> None:
    group = Group()
    assert slowest_line(group, 1) == 8e6  # type: ignore[arg-type]
    group.links = ""
    assert slowest_line(group, 1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("copied", "now", "kept"), [("round 1", "round 1", (2,)), ("round 1", "round 2", ()), ("", "", ())]
)
def test_a_copy_of_local_state_is_kept_only_while_it_is_unchanged(
    monkeypatch: pytest.MonkeyPatch, copied: str, now: str, kept: tuple[int, ...]
) -> None:
    """A round may end between the last copy in the background and the admission."""
    sent: list[Any] = []
    module = "gossamer.comm.elastic.newcomer_state"
    monkeypatch.setattr(
        f"{module}.send_values", lambda group, about, outgoing, *_: sent.append(outgoing) or [{"base": 0}]
    )
    monkeypatch.setattr(Admission, "_outgoing", lambda self, view, trainee, before, kept: kept)
    monkeypatch.setattr(Admission, "_compare", lambda *_: None)
    admission = Admission(SimpleNamespace(number=7), lambda view: Group(), 1.0)  # type: ignore
    admission._copy = BackgroundCopy(Group, receivers=1, began_at=0)  # type: ignore[arg-type]
    admission._copy.group, admission._copy.version = admission._formed(VIEW), copied
    admission.admit(VIEW, SimpleNamespace(version=lambda: now), 5, lambda: 0)  # type: ignore[arg-type]
    assert sent == [kept]
