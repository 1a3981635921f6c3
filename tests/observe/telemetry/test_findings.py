from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.telemetry.findings import AGAIN_SECONDS, OVER, look, paces
from gossamer.observe.watch.summary import read_findings

RUN = SyntheticRun(ranks=4, steps=100, fails=None, ended=False)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    store = open_store(fill(tmp_path / "run.sqlite", RUN))
    with store:
        store.execute("DELETE FROM finding")
        store.execute("DELETE FROM vital")
    yield store
    store.close()


def heard(db: sqlite3.Connection, rank: int, at: float, **values: float) -> None:
    own = {"cpu_share": 1.0, **values}
    insert(
        db,
        "vital",
        ({"machine": RUN.machine(rank), "rank": rank, "at": at, "name": name, "value": own[name]} for name in own),
    )


def written(db: sqlite3.Connection) -> list[tuple[int, str]]:
    return [(rank, cause) for rank, cause in db.execute("SELECT rank, cause FROM finding ORDER BY at")]


def test_the_straggler_of_a_run_is_written_down_once_in_a_while(db: sqlite3.Connection) -> None:
    for rank in range(RUN.ranks):
        heard(db, rank, RUN.at(RUN.steps))
    for seconds in (0.0, 1.0, AGAIN_SECONDS + 2):
        assert look(db, 1000.0 + seconds) is not None
    assert written(db) == [(RUN.straggler, "computing")] * 2


def test_the_cause_is_what_vitals_show(db: sqlite3.Connection) -> None:
    for rank in range(RUN.ranks):
        heard(db, rank, RUN.at(RUN.steps), cpu_wait=0.6 if rank == RUN.straggler else 0.0)
    found = look(db, 0.0)
    assert found is not None
    assert (found.rank, found.cause) == (RUN.straggler, "loaded machine")


def test_who_is_not_heard_any_more_has_stopped(db: sqlite3.Connection) -> None:
    for rank in range(RUN.ranks):
        for late in (0.0, 20.0) if rank != 3 else (0.0,):
            heard(db, rank, RUN.at(RUN.steps) + late)
    found = look(db, 0.0)
    assert found is not None
    assert (found.rank, found.cause) == (3, "stopped")


def test_who_has_left_holds_up_nobody(db: sqlite3.Connection) -> None:
    db.execute("UPDATE rank SET state = 'lost' WHERE rank = ?", (RUN.straggler,))
    assert [pace.rank for pace in paces(db)] == [rank for rank in range(RUN.ranks) if rank != RUN.straggler]
    assert look(db, 0.0) is None
    assert written(db) == []


def test_an_empty_store_has_no_findings(tmp_path: Path) -> None:
    db = open_store(tmp_path / "run.sqlite")
    assert paces(db) == []
    assert look(db, 0.0) is None
    db.close()


def steps_told(db: sqlite3.Connection, data: list[list[float]]) -> None:
    """Of four ranks in lock step, a row for each second: seconds a step of data loading, by rank."""
    db.execute("DELETE FROM step")
    for second, each in enumerate(data):
        longest = max(each)
        for rank, own in enumerate(each):
            row = {"rank": rank, "step": 100 + 10 * second, "at": 1000.0 + second, "steps": 10, "data": 10 * own}
            insert(db, "step", [{**row, "seconds": 10 * (0.08 + longest), "waiting": 10 * (longest - own)}])


CALM, SLOW = [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.055, 0.0]  # two fifths of a step, which the window sees too late


@pytest.mark.parametrize("latest", [[SLOW], [SLOW, SLOW]])
def test_much_is_seen_in_two_batches_and_what_came_once_names_nobody(
    db: sqlite3.Connection, latest: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_told(db, [CALM] * (7 - len(latest)) + [[0.4 * own for own in each] for each in latest])
    assert look(db, 1007.0) is None, "not much, and not for long"
    steps_told(db, [CALM] * (6 - len(latest)) + latest)
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.observe.telemetry.findings.PROMPT_BATCHES", 99)
        assert look(db, 1007.0) is None, "the window alone sees it too late"
    found = look(db, 1007.0)
    assert (found is not None) == (len(latest) == 2)
    assert written(db) == [(2, "data loading")] * (len(latest) - 1)


def test_a_finding_ends_once_its_rank_has_caught_up_and_may_come_again(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM event")
    for at, pace in enumerate((SLOW, CALM, CALM, SLOW, SLOW)):
        steps_told(db, [pace] * 8)
        look(db, 2000.0 + at)
        slow = [finding["rank"] for finding in read_findings(db) if finding["now"]]
        assert slow == ([2] if pace is SLOW else [])
    ends = [tuple(row) for row in db.execute("SELECT at, rank, kind FROM event")]
    assert ends == [(2001.0, 2, OVER)]
    assert written(db) == [(2, "data loading")] * 2


def rates(db: sqlite3.Connection) -> dict[int, dict[int, float] | None]:
    return {pace.rank: None if pace.rates is None else dict(pace.rates) for pace in paces(db)}


def linked(db: sqlite3.Connection, at: float, rate: float | None, used: float = 1.0) -> None:
    row = {"source": 0, "target": 1, "at": at, "round_trip": 0.02, "bytes_per_second": rate, "used_bytes": used}
    insert(db, "link", [row])


def test_rates_of_links_are_the_median_of_when_they_were_full(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM link")
    end = RUN.at(RUN.steps)
    linked(db, end - 7.0, 4e6)
    linked(db, end - 5.0, 5e6)
    linked(db, end - 3.0, 60e6)
    linked(db, end - 1.0, None)  # it had nothing to send
    assert rates(db)[0] == {1: 5e6}


def test_what_was_measured_as_a_group_began_is_no_rate_under_load(db: sqlite3.Connection) -> None:
    """Nor is a single sample: where a mean was taken of both, healthy ranks were named as a run began."""
    db.execute("DELETE FROM link")
    end = RUN.at(RUN.steps)
    linked(db, end - 5.0, 100e6, used=0.0)
    linked(db, end - 3.0, 5e6)
    assert rates(db)[0] is None
    linked(db, end - 1.0, 5e6)
    assert rates(db)[0] == {1: 5e6}


def test_what_a_link_could_do_long_ago_says_nothing_of_now(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM link")
    linked(db, RUN.at(RUN.steps) - 60.0, 5e6)
    assert rates(db)[0] is None
