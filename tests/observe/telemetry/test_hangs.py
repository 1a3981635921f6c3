"""Hang rule: whom, where and since when; and who is never named."""

from __future__ import annotations

import pytest

from gossamer.observe.telemetry.hangs import FIRST_NOTICE_SECONDS, RankActivity, find_hang, patience

NOW, PATIENCE = 1000.0, 10.0


def at(rank: int, *, seconds: float = 12.0, under_way: bool = True, number: int = 17, **more: object) -> RankActivity:
    told = {"operation": "all-reduce", "group": (0, 4), "step": 5, "bucket": 3, "buckets": 7, **more}
    return RankActivity(rank=rank, under_way=under_way, number=number, since=NOW - seconds, **told)  # type: ignore[arg-type]


OUTSIDE = at(2, under_way=False, number=16, seconds=13.0, bucket=2)


def test_the_rank_that_has_not_come_is_named_with_step_operation_and_bucket() -> None:
    hang = find_hang([at(0, waits_for=(2,)), at(1, waits_for=(2,)), OUTSIDE, at(3, waits_for=(2,))], NOW, PATIENCE)
    assert hang is not None
    assert (hang.ranks, hang.step, hang.in_cycle) == ((2,), 5, False)
    assert hang.evidence == (
        "ranks 0, 1 and 3 have waited 12 s for rank 2 in the all-reduce of step 5, bucket 3 of 7; "
        "rank 2 is in no operation: 13 s ago it left the all-reduce of step 5, bucket 2 of 7"
    )


def test_a_chain_leads_to_its_root() -> None:
    """Broken twin: naming whom rank 0 waits for."""
    hang = find_hang([at(0, waits_for=(1,)), at(1, waits_for=(2,)), OUTSIDE], NOW, PATIENCE)
    assert hang is not None
    assert hang.ranks == (2,) != at(0, waits_for=(1,)).waits_for


def test_where_a_transport_does_not_say_whom_the_numbers_of_operations_do() -> None:
    hang = find_hang([at(0), at(1), OUTSIDE, at(3)], NOW, PATIENCE)
    assert hang is not None
    assert hang.ranks == (2,)
    elsewhere = [at(0), at(1), at(2, under_way=False, number=3, group=(4, 4))]
    assert find_hang(elsewhere, NOW, PATIENCE) is None


@pytest.mark.parametrize(
    "activities",
    [
        [at(0, seconds=9.0, waits_for=(1,)), at(1, under_way=False)],
        [RankActivity(rank=0), RankActivity(rank=1)],
        [at(0, waits_for=(1,)), RankActivity(rank=1, saving=True)],
        [at(0, under_way=False), at(1, under_way=False)],
        [],
    ],
    ids=["not yet", "training", "saving", "outside", "nobody"],
)
def test_nobody_is_named(activities: list[RankActivity]) -> None:
    assert find_hang(activities, NOW, PATIENCE) is None


def test_saving_has_an_end_too() -> None:
    hang = find_hang([at(0, seconds=61.0, waits_for=(1,)), RankActivity(rank=1, saving=True)], NOW, PATIENCE)
    assert hang is not None
    assert "rank 1 saves a checkpoint" in hang.evidence


def test_a_cycle_says_which_rank_is_at_which_operation() -> None:
    ranks = [at(0, waits_for=(1,)), at(1, waits_for=(0,), operation="all-gather", step=4, bucket=0)]
    hang = find_hang(ranks, NOW, PATIENCE)
    assert hang is not None
    assert hang.in_cycle
    assert "rank 0 in the all-reduce of step 5, bucket 3 of 7; rank 1 in the all-gather of step 4" in hang.evidence


def test_all_in_the_same_operation_wait_for_the_wire() -> None:
    hang = find_hang([at(0, waits_for=(1,)), at(1, waits_for=(0,))], NOW, PATIENCE)
    assert hang is not None
    assert "what they sent does not arrive" in hang.evidence


def test_a_process_that_is_stopped_within_an_operation_waits_for_nobody() -> None:
    """Its last words still say that it waits: it would be half of a cycle."""
    hang = find_hang([at(0, waits_for=(1,)), at(1, waits_for=(0,), silent_seconds=11.0)], NOW, PATIENCE)
    assert hang is not None
    assert (hang.ranks, hang.in_cycle) == ((1,), False)
    assert "rank 1's process has said nothing for 11 s" in hang.evidence


def test_a_slow_step_is_no_hang() -> None:
    assert patience(10.0, 0.1) == 10.0
    assert patience(10.0, 30.0) == 300.0
    assert patience(10.0, None) == FIRST_NOTICE_SECONDS
