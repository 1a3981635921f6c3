"""Rows: a link's other end is told as a process, and becomes a rank of the store."""

from __future__ import annotations

import sqlite3

from gossamer.observe.telemetry.batches import BatchReader, pack
from gossamer.observe.telemetry.ingest import take_aside
from gossamer.observe.telemetry.rows import NewRows


def told(rank: int, *processes: str) -> NewRows:
    rows = NewRows()
    numbers = {"round_trip": 0.02, "bytes_per_second": None, "used_bytes": 9, "retransmits": 0}
    entry = {"kind": "links", "moment": 5.0, "links": [{"process": each, **numbers} for each in processes]}
    take_aside(rows, rank, "here", entry)
    return rows


def pairs(db: sqlite3.Connection) -> list[tuple[int, int]]:
    return [tuple(row) for row in db.execute("SELECT source, target FROM link ORDER BY source, target")]


def test_a_process_is_the_rank_that_told_of_it(db: sqlite3.Connection) -> None:
    rows = told(0, "here 70", "there 70", "gone 1")
    rows.know(1, machine="here", pid=70)  # in the same look
    rows.know(2, machine="there", pid=70)
    with db:
        rows.write(db)
    assert pairs(db) == [(0, 1), (0, 2)]


def test_where_the_store_knows_nothing_of_a_machine_its_own_word_for_the_rank_holds(db: sqlite3.Connection) -> None:
    rows = told(0, "here 70 5", "elsewhere 3 2")
    rows.know(1, machine="here", pid=70)
    with db:
        rows.write(db)
    assert pairs(db) == [(0, 1), (0, 2)]


def test_a_rank_that_began_again_is_another_process(db: sqlite3.Connection) -> None:
    for pid in (70, 71):
        rows = told(0, f"here {pid}")
        rows.know(1, machine="here", pid=pid)
        with db:
            rows.write(db)
    assert pairs(db) == [(0, 1)] * 2


def test_links_of_another_launcher_come_to_the_ranks_of_the_first_store(db: sqlite3.Connection) -> None:
    first = NewRows()
    first.know(0, machine="here", pid=70)
    with db:
        first.write(db)
        packed = pack(told(0, "here 70"))  # number 0 of the other launcher, which is another rank here
        assert packed is not None
        BatchReader(db).read(packed, lambda number: number + 4, 0.0).write(db)
    assert pairs(db) == [(4, 0)]


def test_a_relay_is_named_by_the_rank_on_its_machine(db: sqlite3.Connection) -> None:
    rows = NewRows()
    numbers = {"round_trip": 0.02, "bytes_per_second": None, "used_bytes": 9, "retransmits": 0}
    relays = {"here 70": None, "there 71": "here 70", "there 72": "", "there 73": "elsewhere 9"}
    links = [{"process": process, **numbers, "through": relay} for process, relay in relays.items()]
    take_aside(rows, 0, "home", {"kind": "links", "moment": 5.0, "links": links})
    for rank, process in enumerate(relays, start=1):
        machine, pid = process.split()
        rows.know(rank, machine=machine, pid=int(pid))
    with db:
        rows.write(db)
    named = [tuple(row) for row in db.execute("SELECT target, through FROM link ORDER BY target")]
    assert named == [(1, None), (2, "rank 1"), (3, "a relay without a worker"), (4, "a relay without a worker")]
