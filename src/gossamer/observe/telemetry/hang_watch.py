"""Hang watch: looks for a hang in a run's store, and has it told once, written down, and all stacks dumped."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.base.run_files import RunFiles
from gossamer.errors import GossamerError
from gossamer.launch.stack_dumps import ask
from gossamer.observe.stacks import newest_dump, read_stacks, side_by_side
from gossamer.observe.telemetry.findings import AWAY, HANG, HANG_OVER
from gossamer.observe.telemetry.hangs import NOTICE_SECONDS, Hang, RankActivity, find_hang, patience

VARIABLE = "GOSSAMER_HANG_SECONDS"
LATEST_STEPS = 200  # rows, of which a usual step is told
MOST_LINES = 400  # of stacks in an event
# A rank's waiting is told two looks after it began, and its vitals come every two seconds
GONE = tuple(state for state in AWAY if state != "saving")


def notice_seconds() -> float:
    """How long a wait may last before it is told, by GOSSAMER_HANG_SECONDS or 10. Raises GossamerError."""
    text = os.environ.get(VARIABLE) or str(NOTICE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0 or not isfinite(seconds):
        raise GossamerError(
            f"{VARIABLE}={text} is no number of seconds above 0, so nobody knows when a wait is a hang. Write "
            f"{VARIABLE}=30, or leave it unset."
        )
    return seconds


def read_activities(db: sqlite3.Connection, now: float) -> list[RankActivity]:
    """What each rank of a store is at that has not ended, in order."""
    heard: dict[int, float] = dict(
        db.execute("SELECT rank, max(at) FROM vital WHERE name = 'cpu_share' AND rank IS NOT NULL GROUP BY rank")
    )
    found = []
    for row in db.execute("SELECT rank, state, activity FROM rank ORDER BY rank"):
        if row["state"] not in GONE:
            about = _fields(row["activity"]) | {"silent_seconds": now - heard.get(row["rank"], now)}
            found.append(RankActivity(rank=row["rank"], saving=row["state"] == "saving", **about))
    return found


def _fields(text: str | None) -> dict[str, Any]:
    told = json.loads(text or "{}")
    names = ("operation", "under_way", "number", "step", "bucket", "buckets", "since")
    return {name: told[name] for name in names if name in told} | {
        name: tuple(told.get(name, default)) for name, default in (("group", (0, 0)), ("waits_for", ()))
    }


class HangWatch:
    """directory: of the run's private files. note: tells the user; tell: writes an event down."""

    def __init__(
        self,
        directory: Path,
        note: Callable[[str], None],
        tell: Callable[..., None],
        dump: Callable[[Sequence[Path]], object] = ask,
    ) -> None:
        self._files, self._note, self._tell, self._dump = RunFiles(directory), note, tell, dump
        self._notice = notice_seconds()
        self._told: tuple[object, ...] = ()
        self._dumping: Hang | None = None  # whose stacks were asked for in the look before
        self._suspected: tuple[object, ...] = ()  # the hang of the look before

    def look(self, db: sqlite3.Connection, now: float | None = None) -> None:
        """Call within a transaction, every few seconds. now: unix seconds."""
        now = time.time() if now is None else now
        if self._dumping is not None:
            self._tell_stacks(self._dumping, db, now)
        hang = self._find(db, now)
        key = (hang.ranks, hang.step, hang.number) if hang else ()
        if key == self._told:
            return
        suspected, self._suspected = self._suspected, key
        if hang is not None and key != suspected:
            return  # for whom one waits, and what that one is at, comes in words of its own, a moment apart
        if hang is None:
            self._note("the ranks that had waited for each other go on")
            db.execute("INSERT INTO event(at, kind, content) VALUES(?, ?, '{}')", (now, HANG_OVER))
        self._told = key
        if hang is not None:
            row = (now, hang.step, hang.ranks[0], HANG, hang.evidence)
            db.execute("INSERT INTO finding(at, step, rank, cause, evidence) VALUES(?, ?, ?, ?, ?)", row)
            self._note(hang.evidence)
            if self._dump(self._files.all_stacks()):
                self._dumping = hang

    def _find(self, db: sqlite3.Connection, now: float) -> Hang | None:
        """What reads more of a store than its ranks is asked only where some have waited for long."""
        if (
            db.execute(
                "SELECT 1 FROM rank WHERE state IN ('waiting', 'saving') AND activity IS NOT NULL LIMIT 1"
            ).fetchone()
            is None
        ):
            return None
        activities = read_activities(db, now)
        if find_hang(activities, now, self._notice) is None:
            return None
        return find_hang(activities, now, patience(self._notice, _usual_step(db)))

    def _tell_stacks(self, hang: Hang, db: sqlite3.Connection, now: float) -> None:
        self._dumping = None
        texts = {int(path.name.split("-")[1]): read_stacks(path) for path in self._files.all_stacks()}
        dumps = {rank: dump for rank, text in texts.items() if (dump := newest_dump(text))}
        lines = side_by_side(dumps, {}, beside=read_places(db, now))
        self._tell("stacks", ranks=list(hang.ranks), why=hang.evidence, lines=lines[:MOST_LINES])


def read_places(db: sqlite3.Connection, now: float | None = None) -> dict[int, str]:
    """By rank, the operation that it is in, in words, with whom it waits for; or its last one."""
    found = {}
    for each in read_activities(db, time.time() if now is None else now):
        if each.under_way:
            whom = f", waits for {', '.join(f'rank {rank}' for rank in each.waits_for)}" if each.waits_for else ""
            found[each.rank] = f"in {each.place}{whom}"
        elif each.operation:
            found[each.rank] = f"after {each.place}"
    return found


def _usual_step(db: sqlite3.Connection) -> float | None:
    rows = db.execute(
        "SELECT seconds / steps AS each FROM step WHERE steps > 0 ORDER BY at DESC LIMIT ?", (LATEST_STEPS,)
    )
    latest = [row["each"] for row in rows]
    return median(latest) if latest else None
