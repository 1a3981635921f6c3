"""Stores of made-up runs for the page: live, crashed and finished ones, and one that is as hostile as it can be."""

from __future__ import annotations

import json
from pathlib import Path

from support.synthetic_store import SyntheticRun, fill

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.runs import WatchedRun

SCRIPT = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
KINDS = {
    "live": SyntheticRun(ranks=4, steps=80, fails=None, ended=False),
    "crashed": SyntheticRun(ranks=8, steps=120),
    "finished": SyntheticRun(ranks=4, steps=100, fails=None),
}


def made(folder: Path, run: SyntheticRun, key: str = "0") -> WatchedRun:
    folder.mkdir(parents=True, exist_ok=True)
    fill(folder, run)
    return WatchedRun(key, folder)


def by_speed(folder: Path) -> WatchedRun:
    """Two ranks that share a step by speed, and two with local steps."""
    run = made(folder, KINDS["finished"])
    db = open_store(folder / "run.sqlite")
    parts = {0: ("share", 0.75), 1: ("share", 0.25), 2: ("local_steps", 20), 3: ("local_steps", 4)}
    with db:
        rows = [{"name": name, "step": 8, "at": 1.0, "rank": rank, "value": v} for rank, (name, v) in parts.items()]
        insert(db, "metric", rows)
    db.close()
    return run


def hostile(folder: Path, metrics: int = 1000) -> WatchedRun:
    """Markup in every name and line, a line of 10 MB, escape codes, bytes that are no UTF-8, a thousand metrics."""
    run = made(folder, SyntheticRun(ranks=2, steps=30))
    db = open_store(folder / "run.sqlite")
    with db:
        insert(db, "run", [{"key": "recipe", "value": json.dumps(SCRIPT)}, {"key": "script", "value": "{half-writ"}])
        lines = (SCRIPT, "x" * 10_000_000, "\x1b[2J\x1b]0;taken\x07red \x1b[31mtext")
        insert(db, "log", [_line(text) for text in lines])
        db.execute(
            "INSERT INTO log(at, rank, attempt, stream, level, text) "
            "VALUES(?, 0, 0, 'stdout', 'info', CAST(? AS TEXT))",
            (1_800_000_101.0, b"caf\xe9 \xff"),
        )
        names = (SCRIPT, *(f"metric-{number:04}" for number in range(metrics)))
        insert(
            db, "metric", [{"name": name, "step": 1, "at": 1_800_000_001.0, "rank": 0, "value": 1.0} for name in names]
        )
        insert(db, "metric", [{"name": "never", "step": 1, "at": 1_800_000_001.0, "rank": 0, "value": None}])
        db.execute("UPDATE failure SET message = ?, traceback = ?", (SCRIPT, f"Traceback\n{SCRIPT}"))
        db.execute("UPDATE tensor SET name = ? WHERE name = 'head.weight'", (SCRIPT,))
        db.execute("UPDATE rank SET machine = ?", (SCRIPT,))
        db.execute("UPDATE event SET content = ? WHERE kind = 'noticed'", (json.dumps({"message": SCRIPT}),))
    db.close()
    return run


def _line(text: str) -> dict[str, object]:
    return {"at": 1_800_000_100.0, "rank": 0, "attempt": 0, "stream": "stdout", "level": "info", "text": text}
