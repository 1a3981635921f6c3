"""Tables tell what a number is of: a rate that is as old as the group is told as such."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from support.paths import ROOT
from support.synthetic_store import SyntheticRun
from support.watched_runs import hostile, made

from gossamer.algorithms.collectives import (
    Collective,
    DirectAllReduce,
    Does,
    HalvingDoubling,
    HierarchicalAllReduce,
    HubAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.tables import LONGEST_LINE, MOST_RANKS, Drawing, LogFilter, drawn, read_lines, read_network

ROW = {"source": 0, "target": 1, "round_trip": 0.02, "used_bytes": 1e6, "retransmits": 0}


def rates(folder: Path, *later: float | None) -> tuple[list[float], list[bool]]:
    db = open_store(folder / "run.sqlite")
    told = [{**ROW, "at": float(at), "bytes_per_second": rate} for at, rate in enumerate((12.5e6, *later))]
    with db:
        insert(db, "link", told)
    pairs = read_network(db)["pairs"]
    db.close()
    return pairs["bytes_per_second"], pairs["rate_at_first"]


def test_a_connection_that_was_never_full_tells_the_rate_as_the_group_began(tmp_path: Path) -> None:
    assert rates(tmp_path, None, None) == ([12.5e6], [True])


def test_a_connection_that_was_full_tells_that_rate(tmp_path: Path) -> None:
    assert rates(tmp_path, 1e6, None) == ([1e6], [False])


ALL = (
    RingAllReduce(),
    HalvingDoubling(),
    TreeAllReduce(),
    DirectAllReduce(),
    HierarchicalAllReduce(per_node=2),
    HubAllReduce(hub=1),
)


def pictures(collective: Collective, world: int) -> list[Drawing]:
    found = drawn(repr(collective), world)
    assert found is not None
    return found


def messages(found: list[Drawing]) -> set[tuple[int, int, int]]:
    """(round, who sends, who receives) of what is drawn."""
    return {
        (number, *hop) for each in found for number in range(each["first"], each["last"] + 1) for hop in each["hops"]
    }


def sent(collective: Collective, world: int) -> set[tuple[int, int, int]]:
    tables = [collective.hops(rank, world) for rank in range(world)]
    return {(hop.round, rank, hop.peer) for rank in range(world) for hop in tables[rank] if hop.does is Does.SEND}


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("collective", ALL, ids=repr)
def test_what_is_drawn_is_what_is_sent(collective: Collective, world: int) -> None:
    assert messages(pictures(collective, world)) == sent(collective, world)


def test_a_drawing_without_one_message_would_be_noticed() -> None:
    found = pictures(RingAllReduce(), 4)
    found[0]["hops"].pop()
    assert messages(found) != sent(RingAllReduce(), 4)


def test_a_ring_is_two_pictures_and_halving_one_for_each_round() -> None:
    ring = pictures(RingAllReduce(), 4)
    assert [(each["first"], each["last"], each["does"], each["share"]) for each in ring] == [
        (0, 2, "add", 0.25),
        (3, 5, "copy", 0.25),
    ]
    assert ring[0]["hops"] == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert [each["share"] for each in pictures(HalvingDoubling(), 4)] == [0.5, 0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "__import__('os').abort()",
        "RingAllReduce(per_node=2)",
        "RingAllReduce(order=(0, 1))",
        "RingAllReduce(order=(0, 'x', 1, 2))",
        "RingAllReduce(order=open('x'))",
        "RingAllReduce(order=" + "(" * 900,
        "HierarchicalAllReduce(per_node=0)",
        "Dense()",
    ],
)
def test_what_is_no_collective_is_not_drawn(text: str) -> None:
    assert drawn(text, 4) is None


@pytest.mark.parametrize("world", [-1, 0, 1, MOST_RANKS + 1, 10**9])
def test_nor_is_one_among_nobody_or_too_many(world: int) -> None:
    assert drawn("RingAllReduce()", world) is None


def test_each_picked_collective_is_drawn_once_at_its_most_bytes(db: sqlite3.Connection) -> None:
    told = [
        {"nbytes": nbytes, "collective": text, "world": 4}
        for nbytes, text in ((1000, "DirectAllReduce()"), (9000, "RingAllReduce()"), (4000, "RingAllReduce()"))
    ] + [{"nbytes": 5, "collective": "RingAllReduce()"}]  # of a version that told no world
    with db:
        insert(
            db, "event", [{"at": 1.0, "rank": 0, "kind": "collective", "content": json.dumps(each)} for each in told]
        )
    found = read_network(db)
    assert [(each["collective"], each["nbytes"]) for each in found["drawings"]] == [
        ("RingAllReduce()", 9000),
        ("DirectAllReduce()", 1000),
    ]
    assert len(found["collectives"]) == 4


def test_pairs_show_the_latest_rate_at_which_they_were_full_and_sums(db: sqlite3.Connection) -> None:
    rows = [(1.0, 0.02, 5e6, 10.0, 1.0), (2.0, 0.03, 4e6, 20.0, 0.0), (3.0, 0.04, None, 5.0, 2.0)]
    names = ("at", "round_trip", "bytes_per_second", "used_bytes", "retransmits")
    with db:
        insert(db, "link", [{"source": 0, "target": 1, **dict(zip(names, row, strict=True))} for row in rows])
    pairs = read_network(db)["pairs"]
    assert {name: values[0] for name, values in pairs.items()} == {
        "source": 0,
        "target": 1,
        "at": 3.0,
        "round_trip": 0.04,
        "bytes_per_second": 4e6,
        "used_bytes": 35.0,
        "retransmits": 3.0,
        "through": None,
        "rate_at_first": False,
    }


def test_a_pair_shows_the_relay_of_its_newest_connection(db: sqlite3.Connection) -> None:
    links = [{**ROW, "at": at, "bytes_per_second": 1e6, "through": relay} for at, relay in enumerate((None, "rank 2"))]
    links += [{**each, "source": 1, "target": 0, "at": 5 - each["at"]} for each in links]
    with db:
        insert(db, "link", links)
    pairs = read_network(db)["pairs"]
    assert list(zip(pairs["source"], pairs["through"], strict=True)) == [(0, "rank 2"), (1, None)]


RUN = SyntheticRun(ranks=3, steps=60)


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        (LogFilter(rank=1), lambda line: line["rank"] == 1),
        (LogFilter(rank=-1), lambda line: line["rank"] is None),
        (LogFilter(level="error"), lambda line: line["level"] == "error"),
        (LogFilter(level="warning"), lambda line: line["level"] in ("warning", "error")),
        (LogFilter(text="STEP 40"), lambda line: "step 40" in line["text"]),
        (LogFilter(text="100%_'"), lambda line: False),
    ],
)
def test_a_filter_gives_all_lines_that_it_wants(tmp_path: Path, wanted: LogFilter, holds: object) -> None:
    with made(tmp_path, RUN).reading() as db:
        everything = read_lines(db, LogFilter(), limit=1000)
        assert callable(holds)
        assert read_lines(db, wanted, limit=1000) == [line for line in everything if holds(line)]


def test_pages_give_every_line_once(tmp_path: Path) -> None:
    with made(tmp_path, RUN).reading() as db:
        everything = {line["id"] for line in read_lines(db, LogFilter(), limit=1000)}
        found: list[int] = []
        before = None
        while page := read_lines(db, LogFilter(), before=before, limit=4):
            found += [line["id"] for line in page]
            before = min(found)
        assert sorted(found) == sorted(everything)
        middle = sorted(everything)[5]
        assert {line["id"] for line in read_lines(db, LogFilter(), after=middle, limit=1000)} == {
            each for each in everything if each > middle
        }


def test_lines_come_by_time(tmp_path: Path) -> None:
    with made(tmp_path, RUN).reading() as db:
        moments = [line["at"] for line in read_lines(db, LogFilter(), limit=1000)]
    assert moments == sorted(moments)


def test_hostile_lines_are_short_and_plain(tmp_path: Path) -> None:
    with hostile(tmp_path, metrics=1).reading() as db:
        lines = read_lines(db, LogFilter(), limit=1000)
    assert max(len(line["text"]) for line in lines) == LONGEST_LINE
    assert {line["more"] for line in lines} == {0, 10_000_000 - LONGEST_LINE}
    assert not any("\x1b" in line["text"] or "taken\x07" in line["text"] for line in lines)
    assert any(line["text"] == "caf\ufffd \ufffd" for line in lines)


def test_sql_has_no_numbered_placeholders_which_python_3_14_refuses_for_sequences() -> None:
    numbered = [path.name for path in (ROOT / "src").rglob("*.py") if re.search(r"= \?\d|[-+] \?\d", path.read_text())]
    assert numbered == []
