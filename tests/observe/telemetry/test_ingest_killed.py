"""A collector that is killed: what it had said to be in the store is there, and the next one goes on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from gossamer.observe.telemetry import Ingest, open_store

PROGRAM = ROOT / "tests" / "support" / "collecting.py"


def kept(folder: Path) -> list[int]:
    db = open_store(folder / "run.sqlite")
    found = [json.loads(row["content"])["number"] for row in db.execute("SELECT content FROM event ORDER BY id")]
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    return found


@pytest.mark.processes
def test_kills_at_random_moments_lose_nothing_that_was_there(tmp_path: Path) -> None:
    draws = random.Random(5)
    written = 0
    for _ in range(3):
        collector = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert collector.stdin is not None
        assert collector.stdout is not None
        told = 0
        for _ in range(draws.randrange(20, 60)):
            with (tmp_path / "aside-0.jsonl").open("a") as file:
                for _ in range(draws.randrange(1, 200)):
                    file.write(json.dumps({"kind": "noticed", "moment": 1.0, "number": written}) + "\n")
                    written += 1
            collector.stdin.write(f"{written}\n")
            collector.stdin.flush()
            if draws.random() < 0.5:  # else it still reads, or writes, when the next lines come, or the kill
                told = int(collector.stdout.readline())
        collector.kill()
        collector.communicate()
        found = kept(tmp_path)
        assert found == list(range(len(found)))
        assert told <= len(found) <= written
    Ingest(tmp_path).finish()
    assert kept(tmp_path) == list(range(written))
