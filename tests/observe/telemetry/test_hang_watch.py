"""Hang watch: a hang in the store is told once, with stacks; its end is told, too."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import findings, insert, open_store
from gossamer.observe.telemetry.entries import take_aside
from gossamer.observe.telemetry.hang_watch import HangWatch, notice_seconds, read_places
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.watch.summary import read_findings

NOW = 5000.0
DUMP = 'Current thread 0x01 (most recent call first):\n  File "/home/me/train.py", line 7 in load_a_batch\n'


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    store = open_store(tmp_path / "run.sqlite")
    with store:
        insert(store, "step", ({"rank": 0, "step": step, "at": NOW, "steps": 1, "seconds": 0.1} for step in range(9)))
    yield store
    store.close()


def tell(db: sqlite3.Connection, rank: int, state: str, **about: object) -> None:
    rows = NewRows()
    place = {"operation": "all-reduce", "number": 17, "place": rank, "world": 2, "step": 5, "bucket": 0, "buckets": 0}
    entry = {"kind": "activity", "state": state, "moment": NOW, **(place | about if about else {})}
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


def test_a_hang_is_told_once_with_the_stacks_of_all(db: sqlite3.Connection, tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    hang(db)
    for seconds in (2.0, 4.0, 6.1, 8.0, 10.0, 12.0):
        seen.watch.look(db, NOW + seconds)
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
    seen.watch.look(db, NOW + 14.0)
    assert seen.notes[1:] == ["the ranks that had waited for each other go on"]


def test_a_hang_is_not_over_because_nobody_is_slow(db: sqlite3.Connection, tmp_path: Path) -> None:
    """Whoever looks for stragglers finds none, since nobody makes a step; that ends no hang."""
    seen = Watched(tmp_path)

    def lasting() -> list[bool]:
        return [found["now"] for found in read_findings(db)]

    with db:
        db.execute("DELETE FROM step")
    hang(db)
    with db:
        seen.watch.look(db, NOW + 68.0)
        seen.watch.look(db, NOW + 70.0)
        assert findings.look(db, NOW + 71.0) is None
    assert lasting() == [True]
    tell(db, 0, "training")
    with db:
        seen.watch.look(db, NOW + 72.0)
    assert lasting() == [False]


def test_the_state_of_a_rank_is_what_it_told_last(db: sqlite3.Connection) -> None:
    def rank(number: int) -> tuple[object, ...]:
        return tuple(db.execute("SELECT state, waits_for FROM rank WHERE rank = ?", (number,)).fetchone())

    hang(db)
    assert (rank(0), rank(1)) == (("waiting", "rank 1"), ("training", None))
    assert read_places(db, NOW) == {
        0: "in the all-reduce of step 5, waits for rank 1",
        1: "after the all-reduce of step 5",
    }
    tell(db, 0, "saving")
    assert rank(0) == ("saving", None)


def test_who_has_ended_is_waited_for_by_nobody(db: sqlite3.Connection, tmp_path: Path) -> None:
    """Broken twin: without its state, a rank that has failed is named again and again."""
    seen = Watched(tmp_path)
    hang(db)
    with db:
        db.execute("UPDATE rank SET state = 'failed' WHERE rank = 0")
    seen.watch.look(db, NOW + 100.0)
    assert seen.notes == []


def test_a_step_that_usually_takes_long_is_no_hang(db: sqlite3.Connection, tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    with db:
        db.execute("UPDATE step SET seconds = 30")
    hang(db)
    for seconds in (98.0, 100.0):
        seen.watch.look(db, NOW + seconds)
    assert seen.notes == []
    for seconds in (298.0, 300.0):
        seen.watch.look(db, NOW + seconds)
    assert len(seen.notes) == 1


def test_words_that_come_a_moment_apart_are_waited_for(db: sqlite3.Connection, tmp_path: Path) -> None:
    """The one that waits says so first without whom, and then with it; the note has both."""
    seen = Watched(tmp_path)
    tell(db, 0, "waiting", under_way=True, seconds=4.0, waits_for=[])
    tell(db, 1, "training", under_way=False, number=16, seconds=5.0, waits_for=[])
    seen.watch.look(db, NOW + 8.0)
    assert seen.notes == []
    hang(db)
    seen.watch.look(db, NOW + 10.0)
    assert "for rank 1" in seen.notes[0]
    assert "waits for rank 1" in read_places(db, NOW + 10.0)[0]


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
        seen.watch.look(db, NOW + seconds)
    assert "for rank 1 in the all-reduce of step 5" in seen.notes[0]
