"""Accusations: literal tables of who is put out."""

from __future__ import annotations

import pytest

from gossamer.comm.membership.view_policy import TRIES, Accusation, AccusationRecord, least_connected


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
def test_who_is_connected_to_the_fewest_goes(
    members: list[int], accusations: list[Accusation], out: int | None
) -> None:
    assert least_connected(members, accusations) == out
    assert least_connected(members, accusations[::-1]) == out


def test_nobody_is_put_out_before_so_many_views_broke_in_a_row() -> None:
    record = AccusationRecord()
    for _ in range(TRIES - 1):
        record.broke({(1, 2)}, explained=False, went_on=False, seconds=1.0)
        assert record.whom([1, 2]) is None
    record.broke({(2, 1)}, explained=False, went_on=False, seconds=1.0)
    assert record.whom([1, 2]) == 2


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
    assert record.whom([1, 2]) is None


def test_a_view_that_broke_without_a_name_puts_nobody_out() -> None:
    record = AccusationRecord()
    for accusations in ({(1, 2)}, set[Accusation](), {(1, 2)}):
        record.broke(accusations, explained=False, went_on=False, seconds=1.0)
    assert record.whom([1, 2]) is None


def test_pauses_double_up_to_a_bound() -> None:
    record, pauses = AccusationRecord(), []
    for _ in range(8):
        record.broke(set(), explained=False, went_on=False, seconds=0.0)
        pauses.append(record.pause_seconds())
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
