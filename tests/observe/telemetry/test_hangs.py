"""Hang rule: whom, where and since when; and who is never named."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import insert, open_store, stragglers
from gossamer.observe.telemetry.hangs import (
    FIRST_NOTICE_SECONDS,
    HangWatch,
    RankActivity,
    find_hang,
    notice_seconds,
    patience,
    read_places,
    roots,
)
from gossamer.observe.telemetry.ingest import take_aside
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.watch.summary import read_findings

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
def test_no_rank_is_named(activities: list[RankActivity]) -> None:
    assert find_hang(activities, NOW, PATIENCE) is None


def test_saving_has_an_end_too() -> None:
    hang = find_hang([at(0, seconds=61.0, waits_for=(1,)), RankActivity(rank=1, saving=True)], NOW, PATIENCE)
    assert hang is not None
    assert "rank 1 saves a checkpoint" in hang.evidence


def test_a_cycle_reports_which_rank_is_at_which_operation() -> None:
    ranks = [at(0, waits_for=(1,)), at(1, waits_for=(0,), operation="all-gather", step=4, bucket=0)]
    hang = find_hang(ranks, NOW, PATIENCE)
    assert hang is not None
    assert hang.in_cycle
    assert "rank 0 in the all-reduce of step 5, bucket 3 of 7; rank 1 in the all-gather of step 4" in hang.evidence


def test_all_in_the_same_operation_wait_for_the_wire() -> None:
    hang = find_hang([at(0, waits_for=(1,)), at(1, waits_for=(0,))], NOW, PATIENCE)
    assert hang is not None
    assert "messages are lost or delayed" in hang.evidence


def test_a_process_that_is_stopped_within_an_operation_waits_for_no_rank() -> None:
    """Its last words still say that it waits: it would be half of a cycle."""
    hang = find_hang([at(0, waits_for=(1,)), at(1, waits_for=(0,), silent_seconds=11.0)], NOW, PATIENCE)
    assert hang is not None
    assert (hang.ranks, hang.in_cycle) == ((1,), False)
    assert "rank 1's process has not reported for 11 s" in hang.evidence


def test_a_slow_step_is_no_hang() -> None:
    assert patience(10.0, 0.1) == 10.0
    assert patience(10.0, 30.0) == 300.0
    assert patience(10.0, None) == FIRST_NOTICE_SECONDS


@pytest.mark.parametrize(
    ("waits_for", "ranks", "in_cycle"),
    [
        ({0: [1], 1: [2]}, (2,), False),
        ({0: [2], 1: [2], 3: [2]}, (2,), False),
        ({0: [1], 1: [0]}, (0, 1), True),
        ({0: [1], 1: [0], 2: [0, 3]}, (3,), False),
        ({0: [1], 1: [0], 2: [0]}, (0, 1), True),
        ({0: [1, 2], 1: [2], 2: []}, (2,), False),
        ({}, (), False),
    ],
)
def test_chains_and_cycles(waits_for: dict[int, list[int]], ranks: tuple[int, ...], in_cycle: bool) -> None:
    found = roots(waits_for)
    assert (found.ranks, found.in_cycle) == (ranks, in_cycle)


def is_closed(ranks: set[int], waits_for: dict[int, list[int]]) -> bool:
    return all(waits_for.get(rank) and set(waits_for[rank]) <= ranks for rank in ranks)


def smallest_cycle(waits_for: dict[int, list[int]], world: int) -> int:
    return next(
        count
        for count in range(1, world + 1)
        if any(is_closed(set(ranks), waits_for) for ranks in combinations(range(world), count))
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_law(seed: int) -> None:
    """Broken twin: whom the first rank waits for, which is not the root of a chain."""
    draw, world = random.Random(seed), 6
    waits_for = {
        rank: draw.sample([peer for peer in range(world) if peer != rank], draw.choice([1, 1, 2]))
        for rank in range(world)
        if draw.random() < draw.choice([0.7, 1.0])
    }
    found = roots(waits_for)
    if found.in_cycle:
        assert is_closed(set(found.ranks), waits_for)
        assert len(found.ranks) == smallest_cycle(waits_for, world)
    elif waits_for:
        assert found.ranks
        assert not any(waits_for.get(rank) for rank in found.ranks)
        assert all(any(rank in peers for peers in waits_for.values()) for rank in found.ranks)


def test_the_twin_that_names_whom_the_first_waits_for_is_wrong() -> None:
    chain = {0: [1], 1: [2], 2: [3]}
    assert tuple(chain[0]) != roots(chain).ranks == (3,)


LOOKED = 5000.0
DUMP = 'Current thread 0x01 (most recent call first):\n  File "/home/me/train.py", line 7 in load_a_batch\n'


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    store = open_store(tmp_path / "run.sqlite")
    with store:
        insert(
            store, "step", ({"rank": 0, "step": step, "at": LOOKED, "steps": 1, "seconds": 0.1} for step in range(9))
        )
    yield store
    store.close()


def tell(db: sqlite3.Connection, rank: int, state: str, **about: object) -> None:
    rows = NewRows()
    place = {"operation": "all-reduce", "number": 17, "place": rank, "world": 2, "step": 5, "bucket": 0, "buckets": 0}
    entry = {"kind": "activity", "state": state, "moment": LOOKED, **(place | about if about else {})}
    take_aside(rows, rank, "machine", entry)
    with db:
        rows.write(db)


class Watched:
    def __init__(self, directory: Path) -> None:
        self.notes, self.events, self.asked = list[str](), list[dict[str, object]](), 0
        self.watch = HangWatch(directory, self.notes.append, lambda kind, **more: self.events.append(more), self.dump)
        self.stacks = directory / "stacks-1-4711.txt"

    def dump(self, paths: object) -> bool:
        self.stacks.write_text(DUMP)
        self.asked += 1
        return True


def hang(db: sqlite3.Connection) -> None:
    tell(db, 0, "waiting", under_way=True, seconds=4.0, waits_for=[1])
    tell(db, 1, "training", under_way=False, number=16, seconds=5.0, waits_for=[])


def test_a_hang_is_reported_once_with_the_stacks_of_all(db: sqlite3.Connection, tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    hang(db)
    for seconds in (2.0, 4.0, 6.1, 8.0, 10.0, 12.0):
        seen.watch.look(db, LOOKED + seconds)
    (note,) = seen.notes
    assert note.startswith("rank 0 has waited 12 s for rank 1 in the all-reduce of step 5; rank 1 is in no operation")
    assert [tuple(row) for row in db.execute("SELECT rank, step, cause, evidence FROM finding")] == [
        (1, 5, "hang", note)
    ]
    (event,) = seen.events
    assert event["why"] == note
    assert "rank 1: at train.py:7 in load_a_batch, after the all-reduce of step 5" in str(event["lines"])
    assert seen.asked == 1
    tell(db, 0, "training")
    seen.watch.look(db, LOOKED + 14.0)
    assert seen.notes[1:] == ["the ranks that had waited for each other continue"]


def test_a_hang_is_not_over_because_nobody_is_slow(db: sqlite3.Connection, tmp_path: Path) -> None:
    """Whoever looks for stragglers finds none, since nobody makes a step; that ends no hang."""
    seen = Watched(tmp_path)

    def lasting() -> list[bool]:
        return [found["now"] for found in read_findings(db)]

    with db:
        db.execute("DELETE FROM step")
    hang(db)
    with db:
        seen.watch.look(db, LOOKED + 68.0)
        seen.watch.look(db, LOOKED + 70.0)
        assert stragglers.look(db, LOOKED + 71.0) is None
    assert lasting() == [True]
    tell(db, 0, "training")
    with db:
        seen.watch.look(db, LOOKED + 72.0)
    assert lasting() == [False]


def test_the_state_of_a_rank_is_what_it_told_last(db: sqlite3.Connection) -> None:
    def rank(number: int) -> tuple[object, ...]:
        return tuple(db.execute("SELECT state, waits_for FROM rank WHERE rank = ?", (number,)).fetchone())

    hang(db)
    assert (rank(0), rank(1)) == (("waiting", "rank 1"), ("training", None))
    assert read_places(db, LOOKED) == {
        0: "in the all-reduce of step 5, waits for rank 1",
        1: "after the all-reduce of step 5",
    }
    tell(db, 0, "saving")
    assert rank(0) == ("saving", None)


def test_a_rank_that_has_ended_is_waited_for_by_nobody(db: sqlite3.Connection, tmp_path: Path) -> None:
    """Broken twin: without its state, a rank that has failed is named again and again."""
    seen = Watched(tmp_path)
    hang(db)
    with db:
        db.execute("UPDATE rank SET state = 'failed' WHERE rank = 0")
    seen.watch.look(db, LOOKED + 100.0)
    assert seen.notes == []


def test_a_step_that_usually_takes_long_is_no_hang(db: sqlite3.Connection, tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    with db:
        db.execute("UPDATE step SET seconds = 30")
    hang(db)
    for seconds in (98.0, 100.0):
        seen.watch.look(db, LOOKED + seconds)
    assert seen.notes == []
    for seconds in (298.0, 300.0):
        seen.watch.look(db, LOOKED + seconds)
    assert len(seen.notes) == 1


def test_words_that_come_a_moment_apart_are_waited_for(db: sqlite3.Connection, tmp_path: Path) -> None:
    """The one that waits says so first without whom, and then with it; the note has both."""
    seen = Watched(tmp_path)
    tell(db, 0, "waiting", under_way=True, seconds=4.0, waits_for=[])
    tell(db, 1, "training", under_way=False, number=16, seconds=5.0, waits_for=[])
    seen.watch.look(db, LOOKED + 8.0)
    assert seen.notes == []
    hang(db)
    seen.watch.look(db, LOOKED + 10.0)
    assert "for rank 1" in seen.notes[0]
    assert "waits for rank 1" in read_places(db, LOOKED + 10.0)[0]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_notice_that_never_comes_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_HANG_SECONDS", text)
    with pytest.raises(GossamerError, match="GOSSAMER_HANG_SECONDS=30"):
        notice_seconds()


def test_a_rank_that_waits_while_it_saves_is_heard(db: sqlite3.Connection, tmp_path: Path) -> None:
    """Broken twin: asking for ranks that wait alone."""
    seen = Watched(tmp_path)
    tell(db, 0, "saving", under_way=True, seconds=4.0, waits_for=[1])
    tell(db, 1, "training", under_way=False, number=16, seconds=5.0, waits_for=[])
    for seconds in (7.0, 9.0):
        seen.watch.look(db, LOOKED + seconds)
    assert "for rank 1 in the all-reduce of step 5" in seen.notes[0]
