"""Tables tell what a number is of: a rate that is as old as the group is told as such."""

from __future__ import annotations

from pathlib import Path

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.tables import read_network

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
