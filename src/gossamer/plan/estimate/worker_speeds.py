"""Worker speeds: the speed of each worker, from a text or from the measurements of a run.

1,1,1,0.2                   by rank: the last worker takes five times as long for a batch
1x3,0.2                     the same
runs/2026-01-31_12-00-00    as measured in this run: 1 for its fastest rank
"""

from __future__ import annotations

import os
import re
import sqlite3
from math import isfinite
from pathlib import Path
from statistics import median

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import STORE_FILE, open_store

SPEED = re.compile(r"^(?P<speed>[0-9.eE+-]+)(\s*x\s*(?P<count>[0-9]+))?$")
MOST_WORKERS = 100_000
WARM_UP_STEPS = 10  # of a run, which include compilation and first allocations
DIGITS = 3  # of a measured speed
#: By rank and row: compute time per step, and the part of a step that the rank computed, if it followed its speed.
WORK = """
    SELECT rank, (seconds - coalesce(waiting, 0)) / steps AS work, coalesce((
        SELECT value FROM metric WHERE name = 'share' AND metric.rank = step.rank AND metric.step < step.step
        ORDER BY metric.step DESC LIMIT 1
    ), 1.0 / (SELECT count(DISTINCT rank) FROM step)) AS part
    FROM step WHERE step > ? AND steps > 0
"""


class SpeedError(GossamerError, ValueError):
    """Speeds of workers are invalid, unknown, or not as many as workers."""


def read_speeds(text: str, workers: int) -> tuple[float, ...]:
    """Return the speed of each worker, by rank.

    Args:
        text: numbers above 0, relative to the worker whose compute time is measured or given: `1,1,1,0.2`, or
            `1x3,0.2`. Twice as fast is 2. Or the folder of a run with as many workers, which measured them.
        workers: number of workers.

    Raises:
        SpeedError: the text is invalid, has another number of workers, or names a run without measurements.
    """
    # Path.is_dir raises for a text that is too long for a name
    found = speeds_of_run(Path(text)) if os.path.isdir(text) else _parsed(text)
    if len(found) != workers:
        raise SpeedError(
            f"{text[:80]!r} has the speeds of {len(found)} workers, and there are {workers}. Name {workers} speeds, or "
            f"write --workers {len(found)}"
        )
    return found


def _parsed(text: str) -> tuple[float, ...]:
    found: list[float] = []
    for part in text.split(","):
        match = SPEED.match(part.strip())
        count = int(match["count"] or 1) if match else 0
        try:
            speed = float(match["speed"]) if match else 0.0
        except ValueError:
            speed = 0.0
        if not (isfinite(speed) and speed > 0 and 1 <= count <= MOST_WORKERS):
            raise SpeedError(
                f"{part.strip()[:40]!r} is not a speed. Write a number above 0 for each worker, such as 1,1,1,0.2, or "
                "1x3,0.2 for three of speed 1, or the folder of a run that measured them"
            )
        found += [speed] * count
    return tuple(found)


def speeds_of_run(folder: Path) -> tuple[float, ...]:
    """Return the speeds of the ranks of a run, by their median compute times: 1 for the fastest.

    Time in which a rank waits for others does not count. With shares by speed, the time is divided by the share.

    Raises:
        SpeedError: the folder has no store, or too few steps.
    """
    if not (folder / STORE_FILE).exists():
        raise SpeedError(f"{folder} has no {STORE_FILE}, so there are no speeds in it. Name the folder of a run's logs")
    db = open_store(folder / STORE_FILE, readonly=True)
    try:
        works: dict[int, list[float]] = {}
        for row in db.execute(WORK, (WARM_UP_STEPS,)):
            if row["part"] and row["work"] > 0:
                works.setdefault(row["rank"], []).append(row["work"] / row["part"])
    except sqlite3.Error as problem:
        raise SpeedError(f"{folder / STORE_FILE} cannot be read: {problem}") from None
    finally:
        db.close()
    if not works or sorted(works) != list(range(len(works))):
        raise SpeedError(f"{folder} has no compute times of every rank after step {WARM_UP_STEPS}. Run more steps")
    seconds = [median(works[rank]) for rank in range(len(works))]
    return tuple(round(min(seconds) / each, DIGITS) for each in seconds)
