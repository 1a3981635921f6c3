"""Views survive being written and read, and what is no view is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gossamer.comm.membership import Member, View
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
        ("newcomers", [8]),
        ("secret", "00"),
        ("secret", "zz" * 32),
        ("secret", None),
    ],
)
def test_what_is_no_view_is_refused(key: str, value: object) -> None:
    with pytest.raises(MalformedError):
        View.of(json.dumps({**json.loads(VIEW.text()), key: value}))


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
