"""What is said while ranks are waited for, in injected time."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from support.virtual_workers import notices

from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> Iterator[list[str]]:
    with notices() as heard:
        yield heard


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> WaitProgress:
    return WaitProgress(0, "gossamer.init()", 1800.0, clock=clock)


def test_it_is_said_every_ten_seconds_with_the_cause_once_and_when_it_is_over(
    progress: WaitProgress, clock: Clock, said: list[str]
) -> None:
    for _ in range(500):  # 25 seconds
        progress.look(lambda: Missing("ranks 1 and 2 of 3", "Start them."))
        clock.now += 0.05
    progress.end()
    progress.end()
    assert said == [
        "rank 0 has waited 10 s for ranks 1 and 2 of 3 to reach gossamer.init(), and waits for 30 min at most "
        "(GOSSAMER_TIMEOUT=1800). Start them.",
        "rank 0 has waited 20 s for ranks 1 and 2 of 3 to reach gossamer.init(), and waits for 30 min at most "
        "(GOSSAMER_TIMEOUT=1800).",
        "rank 0 continues: all reached gossamer.init() after 25 s",
    ]


def test_another_cause_is_said_as_well(progress: WaitProgress, clock: Clock, said: list[str]) -> None:
    for why in ("No such name.", "No such name.", "Connection refused.", "No such name."):
        clock.now += 10
        progress.look(lambda why=why: Missing("rank 0", why))  # type: ignore[misc]
    assert [each.partition("). ")[2] for each in said] == ["No such name.", "", "Connection refused.", ""]


def test_nobody_is_asked_or_told_of_a_short_wait(progress: WaitProgress, clock: Clock, said: list[str]) -> None:
    asked: list[float] = []

    def missing() -> Missing:
        asked.append(clock.now)
        return Missing("rank 1")

    clock.now += 9.9
    progress.look(missing)
    progress.end()
    assert said == asked == []


def test_after_a_pause_it_is_reported_once_and_not_for_each_turn_missed(
    progress: WaitProgress, clock: Clock, said: list[str]
) -> None:
    for seconds in (35.0, 0.0, 4.9, 0.1):
        clock.now += seconds
        progress.look(lambda: Missing("rank 1"))
    assert [each[:23] for each in said] == ["rank 0 has waited 35 s ", "rank 0 has waited 40 s "]


def test_a_rank_is_silent_while_another_says_it(progress: WaitProgress, clock: Clock, said: list[str]) -> None:
    clock.now += 15
    progress.look(lambda: None)
    progress.end()
    assert said == []


def test_the_time_is_up_when_it_is_up(progress: WaitProgress, clock: Clock) -> None:
    clock.now += 1799
    assert not progress.over
    clock.now += 1
    assert progress.over


def test_a_peer_that_waits_for_ever_reports_it(clock: Clock, said: list[str]) -> None:
    progress = WaitProgress(0, "gossamer.init()", inf, clock=clock)
    clock.now += 1e6
    progress.look(lambda: Missing("rank 1"))
    assert not progress.over
    assert said[0].endswith("waits without a limit (GOSSAMER_TIMEOUT=inf).")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1 and 2"),
        ([1, 3, 7], "ranks 1, 3 and 7"),
        ([1, 2, 3], "ranks 1 to 3"),
        ([*range(1, 7), 9, *range(12, 64)], "ranks 1 to 6, 9 and 12 to 63"),
    ],
)
def test_ranks_are_listed_as_people_do(ranks: list[int], said: str) -> None:
    assert named_ranks(ranks) == said
