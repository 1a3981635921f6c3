"""Hangs: finds the rank that others have waited for too long, and its operation; `HangWatch` reads a store."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.base.run_files import RunFiles
from gossamer.base.units import ranks_text
from gossamer.errors import GossamerError
from gossamer.launcher.stack_dumps import ask
from gossamer.observe.stacks import newest_dump, read_stacks, side_by_side
from gossamer.observe.telemetry.stragglers import AWAY, HANG, HANG_OVER

# -- wait for graph ----------------------------------------------------------------------------------------------------
# Finds the end of all chains of waiting ranks.
#
# 0 -> 2 -> 3        3 does not wait: the root of all others
# 1 -> 2
# 0 -> 1 -> 0        a cycle without an exit: all of its ranks


@dataclass(frozen=True)
class WaitRoots:
    """ranks: the ranks at the end of all chains; in_cycle: whether they only wait for each other."""

    ranks: tuple[int, ...]
    in_cycle: bool


def roots(waits_for: Mapping[int, Collection[int]]) -> WaitRoots:
    """Find the roots of the wait-for graph.

    waits_for: for each waiting rank, the ranks that it waits for. A rank without an entry does not wait.

    law:    every waiting rank leads to a root, or the roots are a cycle. Without a root that does not wait, the roots
            are the smallest set of ranks that wait only for each other
    """
    free = {peer for peers in waits_for.values() for peer in peers if not waits_for.get(peer)}
    if free:
        return WaitRoots(tuple(sorted(free)), in_cycle=False)
    closures = [_reached(rank, waits_for) for rank in waits_for if waits_for[rank]]
    least = min(closures, key=lambda closure: (len(closure), sorted(closure)), default=frozenset[int]())
    return WaitRoots(tuple(sorted(least)), in_cycle=bool(least))


def _reached(rank: int, waits_for: Mapping[int, Collection[int]]) -> frozenset[int]:
    """All ranks that a rank waits for, directly or indirectly."""
    seen: set[int] = set()
    following = list(waits_for[rank])
    while following:
        peer = following.pop()
        if peer not in seen:
            seen.add(peer)
            following.extend(waits_for.get(peer, ()))
    return frozenset(seen)


_ranks = partial(ranks_text, last=" and ")
NOTICE_SECONDS = 10.0
FIRST_NOTICE_SECONDS = 60.0  # before the first step has ended: compiling and loading are slow
USUAL_STEPS = 10.0  # a wait of fewer steps is not a hang: validation takes longer than a step
SAVING_NOTICES = 6.0  # a checkpoint may take this many times longer
SILENT_SECONDS = 6.0  # vitals come every two seconds


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """Last reported activity of one rank. Times are unix seconds."""

    rank: int
    operation: str = ""  # the current or last one
    under_way: bool = False
    number: int = -1  # of the operation in its group
    group: tuple[int, int] = (0, 0)  # first rank and size
    step: int = 0
    bucket: int = 0  # from 1; 0: no bucket
    buckets: int = 0
    since: float = 0.0
    waits_for: tuple[int, ...] = ()
    saving: bool = False
    silent_seconds: float = 0.0  # since the last report of its process

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds >= SILENT_SECONDS

    @property
    def place(self) -> str:
        """The operation as text, such as "the all-reduce of step 12, bucket 3 of 7"."""
        of = f" of {self.buckets}" if self.bucket <= self.buckets else ""
        return f"the {self.operation} of step {self.step}" + (f", bucket {self.bucket}{of}" if self.bucket else "")


@dataclass(frozen=True)
class Hang:
    """ranks: the ranks that others wait for; in_cycle: whether they wait for each other. evidence: sentences."""

    ranks: tuple[int, ...]
    step: int
    number: int  # of the operation in which ranks wait
    in_cycle: bool
    evidence: str


def patience(notice_seconds: float, step_seconds: float | None) -> float:
    """Longest wait in seconds that is not a hang. step_seconds: of a usual step; None before the first."""
    if step_seconds is None:
        return max(notice_seconds, FIRST_NOTICE_SECONDS)
    return max(notice_seconds, USUAL_STEPS * step_seconds)


def find_hang(activities: Sequence[RankActivity], now: float, patience_seconds: float) -> Hang | None:
    """The current hang; None without one. now: unix seconds."""
    known = {each.rank: each for each in activities}
    waiting = {
        rank: each
        for rank, each in known.items()
        if each.under_way and not each.is_silent and now - each.since >= patience_seconds
    }
    edges = {rank: awaited for rank, each in waiting.items() if (awaited := _waits_for(each, known))}
    found = roots(edges)
    if not found.ranks:
        return None
    longest = max((waiting[rank] for rank in edges), key=lambda each: now - each.since)
    of_roots = [known[rank] for rank in found.ranks if rank in known]
    if any(each.saving for each in of_roots) and now - longest.since < SAVING_NOTICES * patience_seconds:
        return None
    first = longest if not found.in_cycle else waiting[found.ranks[0]]
    describe = _cycle_text if found.in_cycle else _root_text
    return Hang(
        found.ranks, first.step, first.number, found.in_cycle, describe(found.ranks, edges, known, longest, now)
    )


def _waits_for(waiting: RankActivity, known: Mapping[int, RankActivity]) -> frozenset[int]:
    """Ranks reported by the transport; without a report, those of its group that have not begun the operation."""
    if waiting.waits_for:
        return frozenset(waiting.waits_for) - {waiting.rank}
    return frozenset(
        rank
        for rank, each in known.items()
        if each.group == waiting.group and each.number < waiting.number and rank != waiting.rank
    )


def _root_text(
    ranks: Sequence[int],
    edges: Mapping[int, frozenset[int]],
    known: Mapping[int, RankActivity],
    longest: RankActivity,
    now: float,
) -> str:
    have = "have" if len(edges) > 1 else "has"
    text = f"{_ranks(sorted(edges))} {have} waited {now - longest.since:.0f} s for {_ranks(ranks)} in {longest.place}"
    return "; ".join([text, *(_meanwhile(rank, known.get(rank), now) for rank in ranks[:4])])


def _meanwhile(rank: int, at: RankActivity | None, now: float) -> str:
    if at is None:
        return f"this store has no report of rank {rank}"
    if at.is_silent:
        return f"rank {rank}'s process has not reported for {at.silent_seconds:.0f} s: it or its machine is stopped"
    if at.saving:
        return f"rank {rank} saves a checkpoint"
    if at.under_way:
        return f"rank {rank} is in {at.place} itself"
    if not at.operation:
        return f"rank {rank} trains"
    return f"rank {rank} is in no operation: {now - at.since:.0f} s ago it left {at.place}"


def _cycle_text(
    ranks: Sequence[int],
    edges: Mapping[int, frozenset[int]],
    known: Mapping[int, RankActivity],
    longest: RankActivity,
    now: float,
) -> str:
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(known[rank].place, []).append(rank)
    head = f"{_ranks(ranks)} have waited {now - longest.since:.0f} s for each other"
    if len(places) == 1:
        return f"{head} in {longest.place}: all have begun it, so messages are lost or delayed"
    at = "; ".join(f"{_ranks(each)} in {place}" for place, each in places.items())
    return f"{head}, in different operations: {at}. Look for code before them that depends on the rank"


# -- hang watch --------------------------------------------------------------------------------------------------------
# Searches a run's store for a hang. Reports it once, writes it to the store, and requests all stacks.

VARIABLE = "GOSSAMER_HANG_SECONDS"
LATEST_STEPS = 200  # rows for the median step time
MOST_LINES = 400  # of stacks per event
# A wait is reported two samples after its begin, and vitals come every two seconds
GONE = tuple(state for state in AWAY if state != "saving")


def notice_seconds() -> float:
    """Longest wait in seconds before a report: GOSSAMER_HANG_SECONDS, or 10. Raises GossamerError."""
    text = os.environ.get(VARIABLE) or str(NOTICE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0 or not isfinite(seconds):
        raise GossamerError(
            f"{VARIABLE}={text} must be a number of seconds above 0, the wait that counts as a hang. Write "
            f"{VARIABLE}=30, or leave it unset."
        )
    return seconds


def read_activities(db: sqlite3.Connection, now: float) -> list[RankActivity]:
    """Current activity of each rank of a store that has not ended, in order."""
    received: dict[int, float] = dict(
        db.execute("SELECT rank, max(at) FROM vital WHERE name = 'cpu_share' AND rank IS NOT NULL GROUP BY rank")
    )
    found = []
    for row in db.execute("SELECT rank, state, activity FROM rank ORDER BY rank"):
        if row["state"] not in GONE:
            about = _fields(row["activity"]) | {"silent_seconds": now - received.get(row["rank"], now)}
            found.append(RankActivity(rank=row["rank"], saving=row["state"] == "saving", **about))
    return found


def _fields(text: str | None) -> dict[str, Any]:
    parsed = json.loads(text or "{}")
    names = ("operation", "under_way", "number", "step", "bucket", "buckets", "since")
    return {name: parsed[name] for name in names if name in parsed} | {
        name: tuple(parsed.get(name, default)) for name, default in (("group", (0, 0)), ("waits_for", ()))
    }


class HangWatch:
    """Reports hangs. directory: private files of the run. note: shows a message; `report`: writes an event."""

    def __init__(
        self,
        directory: Path,
        note: Callable[[str], None],
        report: Callable[..., None],
        dump: Callable[[Sequence[Path]], object] = ask,
    ) -> None:
        self._files, self._note, self._report, self._dump = RunFiles(directory), note, report, dump
        self._notice = notice_seconds()
        self._reported: tuple[object, ...] = ()
        self._dumping: Hang | None = None  # its stacks were requested in the previous look
        self._suspected: tuple[object, ...] = ()  # the hang of the previous look

    def look(self, db: sqlite3.Connection, now: float | None = None) -> None:
        """Search once. Call it within a transaction, every few seconds. now: unix seconds."""
        now = time.time() if now is None else now
        if self._dumping is not None:
            self._report_stacks(self._dumping, db, now)
        hang = self._find(db, now)
        key = (hang.ranks, hang.step, hang.number) if hang else ()
        if key == self._reported:
            return
        suspected, self._suspected = self._suspected, key
        if hang is not None and key != suspected:
            return  # reports of both ranks arrive at different times: wait for the next look
        if hang is None:
            self._note("the ranks that had waited for each other continue")
            db.execute("INSERT INTO event(at, kind, content) VALUES(?, ?, '{}')", (now, HANG_OVER))
        self._reported = key
        if hang is not None:
            row = (now, hang.step, hang.ranks[0], HANG, hang.evidence)
            db.execute("INSERT INTO finding(at, step, rank, cause, evidence) VALUES(?, ?, ?, ?, ?)", row)
            self._note(hang.evidence)
            if self._dump(self._files.all_stacks()):
                self._dumping = hang

    def _find(self, db: sqlite3.Connection, now: float) -> Hang | None:
        """The current hang. It reads more of the store only if some ranks have waited for long."""
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

    def _report_stacks(self, hang: Hang, db: sqlite3.Connection, now: float) -> None:
        self._dumping = None
        texts = {int(path.name.split("-")[1]): read_stacks(path) for path in self._files.all_stacks()}
        dumps = {rank: dump for rank, text in texts.items() if (dump := newest_dump(text))}
        lines = side_by_side(dumps, {}, notes=read_places(db, now))
        self._report("stacks", ranks=list(hang.ranks), why=hang.evidence, lines=lines[:MOST_LINES])


def read_places(db: sqlite3.Connection, now: float | None = None) -> dict[int, str]:
    """Current or last operation of each rank as text, with the ranks that it waits for."""
    found = {}
    for each in read_activities(db, time.time() if now is None else now):
        if each.under_way:
            awaited = f", waits for {', '.join(f'rank {rank}' for rank in each.waits_for)}" if each.waits_for else ""
            found[each.rank] = f"in {each.place}{awaited}"
        elif each.operation:
            found[each.rank] = f"after {each.place}"
    return found


def _usual_step(db: sqlite3.Connection) -> float | None:
    rows = db.execute(
        "SELECT seconds / steps AS each FROM step WHERE steps > 0 ORDER BY at DESC LIMIT ?", (LATEST_STEPS,)
    )
    latest = [row["each"] for row in rows]
    return median(latest) if latest else None
