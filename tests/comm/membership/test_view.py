"""Views survive being written and read, and what is no view is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gossamer.comm.membership import Member, View
from gossamer.comm.membership.view import RelayAddress
from gossamer.errors import MalformedError

VIEW = View(
    number=3,
    members=(Member(number=2**62 + 1, host="10.0.0.1", port=4000), Member(number=7, host="::1", port=1)),
    newcomers=frozenset({7}),
    secret=bytes(range(32)),
)


def test_a_view_is_read_as_it_was_written() -> None:
    assert View.of(VIEW.text()) == VIEW
    assert [VIEW.rank_of(member.number) for member in VIEW.members] == [0, 1]
    assert VIEW.holds(7)
    assert not VIEW.holds(8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("number", -1),
        ("number", True),
        ("members", []),
        ("members", [[7, "a", 1], [7, "b", 2]]),
        ("members", [[7, "a", 2**16]]),
        ("members", [[7, "", 1]]),
        ("members", [[7, "a"]]),
        ("members", [[7, "a", 1, ["b", 2**16]]]),
        ("members", [[7, "a", 1, "b"]]),
        ("members", [[7, "a", 1, *[["b", 2]] * 5]]),
        ("relays", [["a", 1]]),
        ("relays", [["a", 1, -1]]),
        ("relays", 3),
        ("newcomers", [8]),
        ("secret", "00"),
        ("secret", "zz" * 32),
        ("secret", None),
    ],
)
def test_an_invalid_view_is_refused(key: str, value: object) -> None:
    with pytest.raises(MalformedError):
        View.of(json.dumps({**json.loads(VIEW.text()), key: value}))


def test_further_addresses_of_members_and_relays_are_kept_in_all_stages() -> None:
    members = (replace(VIEW.members[0], others=(("203.0.113.7", 5), ("2001:db8::1", 6))), VIEW.members[1])
    view = replace(VIEW, members=members, relays=(RelayAddress(host="198.51.100.7", port=8, number=2**61),))
    assert View.of(view.text()) == view
    assert view.members[0].addresses == (("10.0.0.1", 4000), ("203.0.113.7", 5), ("2001:db8::1", 6))
    for whole in (False, True):
        assert view.stage(whole=whole).relays == view.relays
        assert view.stage(whole=whole).members[0] == members[0]


@pytest.mark.parametrize("text", ["", "[]", "3", '{"number": 1}', "\ud800"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        View.of(text)


def test_the_stages_of_all_views_have_different_numbers() -> None:
    views = [replace(VIEW, number=number) for number in (1, 2, 3)]
    stages = [each.stage(whole=whole) for each in views for whole in (False, True)]
    assert len({stage.number for stage in stages}) == 6
    assert [stage.number for stage in stages] == sorted(stage.number for stage in stages)
    assert stages[0].numbers == (2**62 + 1,)
    assert stages[1].numbers == VIEW.numbers


AFTER = replace(
    VIEW,
    number=4,
    members=(replace(VIEW.members[1], others=(("203.0.113.7", 5),)), Member(number=9, host="10.0.0.9", port=9)),
    newcomers=frozenset({9}),
    secret=bytes(32),
    relays=(RelayAddress(host="198.51.100.7", port=8, number=2**61),),
)


def test_a_change_turns_its_base_into_the_later_view() -> None:
    assert VIEW.changed(AFTER.change_text(VIEW)) == AFTER
    assert AFTER.changed(replace(AFTER, number=5).change_text(AFTER)) == replace(AFTER, number=5)


def test_a_change_is_as_long_as_what_changed() -> None:
    members = tuple(Member(number=each, host="10.0.0.1", port=4000) for each in range(1000))
    large = replace(VIEW, members=members, newcomers=frozenset())
    assert len(replace(large, number=4, members=members[1:]).change_text(large)) < 400


@pytest.mark.parametrize("members", [VIEW.members[::-1], (AFTER.members[1], *VIEW.members)])
def test_a_view_in_another_order_is_no_change(members: tuple[Member, ...]) -> None:
    assert replace(VIEW, number=4, members=members).change_text(VIEW) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base", 2),
        ("number", 5),
        ("removed", []),
        ("removed", 3),
        ("replaced", []),
        ("added", []),
        ("added", [[9, "10.0.0.9", 10]]),
        ("newcomers", []),
        ("digest", "0" * 64),
        ("secret", "00"),
        ("secret", None),
    ],
)
def test_a_change_that_does_not_lead_to_the_intended_view_is_refused(key: str, value: object) -> None:
    with pytest.raises(MalformedError, match=r"change|secret"):
        VIEW.changed(json.dumps({**json.loads(AFTER.change_text(VIEW)), key: value}))
