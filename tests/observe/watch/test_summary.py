"""Differences of ranks' environments: those alone, and who has what."""

from __future__ import annotations

from pathlib import Path

from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.summary import differences, read_ranks

ALIKE = {"python": "3.11.7", "torch": "2.13.0"}


def test_what_is_alike_is_not_listed() -> None:
    assert differences(dict.fromkeys(range(4), ALIKE)) == []
    assert differences({}) == []


def test_a_difference_is_listed_with_who_has_it() -> None:
    ranks = {0: {**ALIKE, "OMP_NUM_THREADS": "8"}, 1: ALIKE, 2: {**ALIKE, "torch": "2.12\x1b[31m.0"}}
    assert differences(ranks) == [
        {"name": "OMP_NUM_THREADS", "values": [{"value": None, "ranks": [1, 2]}, {"value": "8", "ranks": [0]}]},
        {
            "name": "torch",
            "values": [{"value": "2.13.0", "ranks": [0, 1]}, {"value": "2.12.0", "ranks": [2]}],
        },
    ]


def test_the_part_of_the_work_of_a_rank_is_its_latest(tmp_path: Path) -> None:
    db = open_store(fill(tmp_path, SyntheticRun(ranks=3)))
    assert [(rank["share"], rank["local_steps"]) for rank in read_ranks(db)] == [(None, None)] * 3
    parts = [(0, 8, 0.5), (0, 16, 0.6), (1, 16, 0.4)]
    insert(db, "metric", [{"name": "share", "step": s, "at": s, "rank": r, "value": v} for r, s, v in parts])
    insert(db, "metric", [{"name": "local_steps", "step": 20, "at": 20, "rank": 2, "value": 4}])
    db.commit()
    assert [(rank["share"], rank["local_steps"]) for rank in read_ranks(db)] == [(0.6, None), (0.4, None), (None, 4)]
    db.close()
