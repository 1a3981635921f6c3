from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.telemetry.stragglers import AGAIN_SECONDS, OVER, RankPace, Straggler, look, paces, straggler
from gossamer.observe.watch.summary import read_findings

WORKERS = 4
COMPUTE, WIRE, LINK = 0.08, 0.02, 12.5e6  # seconds of a step; bytes a second
Work = Callable[[RankPace], RankPace]


def healthy(draw: Random, world: int = WORKERS) -> list[RankPace]:
    """Ranks whose work differs by a few percent, before lock step makes their steps equally long."""
    return [
        RankPace(
            rank=rank,
            step=100,
            seconds=COMPUTE * draw.uniform(0.95, 1.05),
            waiting=0.0,
            data=0.002 * draw.random(),
            garbage=0.001 * draw.random(),
            crowded=0.05 * draw.random(),
            silent_seconds=draw.random(),
            rates={peer: LINK * draw.uniform(0.8, 1.2) for peer in range(world) if peer != rank},
        )
        for rank in range(world)
    ]


def in_lock_step(paces: list[RankPace], wire: float = WIRE) -> list[RankPace]:
    """Everybody waits for who works longest, then for the wire."""
    seconds = max(pace.seconds for pace in paces) + wire
    return [replace(pace, waiting=seconds - pace.seconds, seconds=seconds) for pace in paces]


def slowed(seed: int, spoil: Work, wire: float = WIRE) -> tuple[int, Straggler | None]:
    draw = Random(seed)
    paces = healthy(draw)
    rank = draw.randrange(WORKERS)
    paces[rank] = spoil(paces[rank])
    return rank, straggler(in_lock_step(paces, wire))


def longer(pace: RankPace, **changes: float) -> RankPace:
    return replace(pace, seconds=pace.seconds + 0.06, **changes)


CAUSES: dict[str, Work] = {
    "computing": longer,
    "data loading": lambda pace: longer(pace, data=pace.data + 0.06),
    "garbage collection": lambda pace: longer(pace, garbage=pace.garbage + 0.05),
    "loaded machine": lambda pace: longer(pace, crowded=0.4),
    "stopped": lambda pace: replace(pace, silent_seconds=6.0),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("seed", range(20))
def test_the_slow_rank_is_named_with_its_cause(cause: str, seed: int) -> None:
    rank, found = slowed(seed, CAUSES[cause])
    assert found is not None
    assert (found.rank, found.cause) == (rank, cause)


@pytest.mark.parametrize("seed", range(20))
def test_a_used_up_quota_is_slow_computing_and_reports_it(seed: int) -> None:
    rank, found = slowed(seed, lambda pace: longer(pace, denied=0.4, crowded=0.1))
    assert found is not None
    assert (found.rank, found.cause) == (rank, "computing")
    assert "its CPU quota was used up for 40%" in found.evidence


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_link_is_found_though_everybody_waits_alike(seed: int) -> None:
    draw = Random(seed)
    slow = draw.randrange(WORKERS)
    paces = [
        replace(
            pace, rates={peer: rate * (0.2 if slow in (pace.rank, peer) else 1) for peer, rate in pace.rates.items()}
        )
        for pace in healthy(draw)
        if pace.rates is not None
    ]
    found = straggler(in_lock_step(paces, wire=0.3))
    assert found is not None
    assert (found.rank, found.cause) == (slow, "link")
    assert straggler(in_lock_step(paces, wire=0.005)) is None, "nobody waits for it"


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_with_one_fast_connection_has_no_slow_link(seed: int) -> None:
    """Where packets are lost, what a connection reaches is a matter of chance."""
    draw = Random(seed)
    slow = draw.randrange(WORKERS)
    paces = [
        replace(pace, rates={peer: rate * (0.2 if slow == pace.rank else 1) for peer, rate in pace.rates.items()})
        for pace in healthy(draw)
        if pace.rates is not None
    ]
    assert straggler(in_lock_step(paces, wire=0.3)) is None


@pytest.mark.parametrize("world", [2, 4, 64])
@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_named_in_a_healthy_run(seed: int, world: int) -> None:
    for wire in (0.0, WIRE, 1.0):
        assert straggler(in_lock_step(healthy(Random(seed), world), wire)) is None


def test_a_rank_that_works_longer_and_delays_no_rank_is_not_named() -> None:
    """As in local training and pairwise gossip: its steps take longer, and the others' do not."""
    paces = healthy(Random(0))
    paces[1] = longer(paces[1])
    assert straggler(paces) is None


def test_much_slower_computing_gets_the_proposal_of_shares_by_speed_with_its_gain() -> None:
    paces = [RankPace(rank=rank, step=100, seconds=5.0, waiting=5.0 - work) for rank, work in enumerate((1, 1, 1, 5))]
    found = straggler(paces)
    assert found is not None
    assert "5.0 times as long" in found.evidence
    assert "use 0.25 of what these ranks can compute" in found.evidence  # 4 of 5 s of 3.2 workers
    assert "balance=True" in found.evidence
    assert "AsyncDiLoCo(period=24), on servers, 1.00 and Gossip(mixing='pairwise') 1.00" in found.evidence
    assert "gossamer advise --speeds" in found.evidence
    mild = straggler([replace(pace, waiting=0.0 if pace.rank == 3 else 1.2) for pace in paces])
    assert mild is not None
    assert "balance" not in mild.evidence


def test_there_is_nothing_to_tell_of_one_or_none() -> None:
    assert straggler([]) is None
    assert straggler(healthy(Random(0))[:1]) is None


def test_where_nobody_is_heard_nobody_is_stopped() -> None:
    paces = [replace(pace, silent_seconds=30.0) for pace in healthy(Random(0))]
    assert straggler(in_lock_step(paces)) is None


def test_a_rank_that_waits_as_long_as_the_others_holds_nobody_up() -> None:
    """Its work is longer, but it waits, too: all wait for something else, such as a slow line."""
    paces = [RankPace(rank=rank, step=100, seconds=0.2, waiting=0.1) for rank in range(3)]
    also_waits = RankPace(rank=3, step=100, seconds=0.3, waiting=0.1)
    assert straggler([*paces, also_waits]) is None
    held_up = [replace(pace, seconds=0.3, waiting=0.2) for pace in paces]
    found = straggler([*held_up, replace(also_waits, waiting=0.0)])
    assert found is not None
    assert found.rank == 3


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


def test_a_rank_that_is_not_heard_any_more_has_stopped(db: sqlite3.Connection) -> None:
    for rank in range(RUN.ranks):
        for late in (0.0, 20.0) if rank != 3 else (0.0,):
            heard(db, rank, RUN.at(RUN.steps) + late)
    found = look(db, 0.0)
    assert found is not None
    assert (found.rank, found.cause) == (3, "stopped")


def test_a_rank_that_has_left_delays_no_rank(db: sqlite3.Connection) -> None:
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
def test_much_is_seen_in_two_batches_and_what_came_once_names_no_rank(
    db: sqlite3.Connection, latest: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_told(db, [CALM] * (7 - len(latest)) + [[0.4 * own for own in each] for each in latest])
    assert look(db, 1007.0) is None, "not much, and not for long"
    steps_told(db, [CALM] * (6 - len(latest)) + latest)
    with monkeypatch.context() as patch:
        patch.setattr("gossamer.observe.telemetry.stragglers.PROMPT_BATCHES", 99)
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
