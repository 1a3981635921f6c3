"""Differences of ranks' environments: those alone, and who has what."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.summary import differences, read_findings, read_ranks, summarize

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


def test_the_loss_is_of_a_rank_that_trains(tmp_path: Path) -> None:
    run = SyntheticRun(ranks=3, steps=60, fails=None, ended=False)
    db = open_store(fill(tmp_path, run))
    with db:
        db.execute("DELETE FROM metric WHERE rank = 0 AND step > 20")
    assert summarize(db)["loss"]["step"] == 20
    with db:
        db.execute("UPDATE rank SET state = 'lost' WHERE rank = 0")
    assert summarize(db)["loss"]["step"] == 60
    with db:
        db.execute("UPDATE rank SET state = 'lost'")
    assert summarize(db)["loss"]["step"] == 20
    db.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_repeated_finding_shows_its_latest_evidence_and_step(tmp_path: Path, order: tuple[int, ...]) -> None:
    db = open_store(tmp_path / "run.sqlite")
    same = {"rank": 1, "cause": "computing"}
    rows = [{"at": 100.0 + place, "step": 10 + place, "evidence": f"look {place}", **same} for place in order]
    insert(db, "finding", [*rows, {"at": 101.5, "step": 3, "rank": 0, "cause": "link", "evidence": "slow"}])
    latest = {
        "rank": 1,
        "cause": "computing",
        "at": 102.0,
        "step": 12,
        "evidence": "look 2",
        "times": 3,
        "first": 100.0,
    }
    other = {"rank": 0, "cause": "link", "at": 101.5, "step": 3, "evidence": "slow", "times": 1, "first": 101.5}
    assert read_findings(db) == [{**latest, "now": True}, {**other, "now": False}]
    assert read_findings(db, 1) == [{**latest, "now": True}]
    db.close()
