"""Stragglers: names the rank that all others wait for, and why it takes longer than they do.

In lock step every rank's steps take equally long, and only what they consist of differs: who works longest waits least.
So a straggler is told by its own work, not by its step time.

    rank 0   work ####          waiting ######          rank 2 is named: its work is longer than the others' by what
    rank 1   work #####         waiting #####           they wait, and most of the difference is data loading
    rank 2   data ###### work ####

`look` applies this rule to the latest rows of a store, and writes what it finds.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Cause = Literal["computing", "data loading", "garbage collection", "loaded machine", "link", "stopped"]

NOTEWORTHY = 0.2  # of a step: less is noise between equal machines
EXPLAINED = 0.5  # of the excess, that others must wait, or a counter must show
SLOWER_LINK = 0.6  # of the median rate between the other ranks
MUCH_WAITING = 0.3  # of a step: below it a slow link costs nobody anything
SILENT_STEPS, SILENT_SECONDS = 5.0, 5.0  # vitals come every two seconds


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """What one rank's steps consist of, on average over the same few steps of all ranks: seconds of one step."""

    rank: int
    step: int  # the last of them
    seconds: float
    waiting: float  # of the training thread, for others or for the wire
    data: float = 0.0  # between a step's end and the next forward pass
    garbage: float = 0.0  # in the garbage collector
    denied: float = 0.0  # share of time in which its control group's quota was used up
    crowded: float = 0.0  # share of time that its training thread was ready and had no core
    silent_seconds: float = 0.0  # since its process was last heard
    rates: Mapping[int, float] | None = None  # bytes a second of its connections, by peer

    @property
    def work(self) -> float:
        return self.seconds - self.waiting


@dataclass(frozen=True)
class Straggler:
    """The rank that others wait for, with one sentence of evidence."""

    rank: int
    step: int
    cause: Cause
    evidence: str


def straggler(paces: Sequence[RankPace], noteworthy: float = NOTEWORTHY) -> Straggler | None:
    """Who holds up the others; None where nobody does, or there is nobody to compare it with.

    noteworthy: how much longer its work must be, of a step
    law:    at most one is named, and nobody whose work is within that of the others' median
    """
    if len(paces) < 2:
        return None
    return _stopped(paces) or _slow(paces, noteworthy) or _behind_a_slow_link(paces)


def _stopped(paces: Sequence[RankPace]) -> Straggler | None:
    last = max(paces, key=lambda pace: pace.silent_seconds)
    others = [pace.silent_seconds for pace in paces if pace is not last]
    patience = max(SILENT_SECONDS, SILENT_STEPS * median(pace.seconds for pace in paces))
    if last.silent_seconds - max(others) < patience:
        return None
    said = f"its process has said nothing for {last.silent_seconds:.1f} s, and all others have"
    return Straggler(last.rank, last.step, "stopped", said)


def _slow(paces: Sequence[RankPace], noteworthy: float) -> Straggler | None:
    slowest = max(paces, key=lambda pace: pace.work)
    others = [pace for pace in paces if pace is not slowest]
    excess = slowest.work - median(pace.work for pace in others)
    waited = median(pace.waiting for pace in others) - slowest.waiting
    if excess < noteworthy * median(pace.seconds for pace in paces) or waited < EXPLAINED * excess:
        return None
    cause, evidence = _why(slowest, others, excess)
    return Straggler(slowest.rank, slowest.step, cause, evidence)


def _why(slowest: RankPace, others: Sequence[RankPace], excess: float) -> tuple[Cause, str]:
    data = slowest.data - median(pace.data for pace in others)
    garbage = slowest.garbage - median(pace.garbage for pace in others)
    longer = f"its own work takes {_ms(excess)} a step longer than the others'"
    if garbage >= EXPLAINED * excess:
        return "garbage collection", f"{longer}, and {_ms(garbage)} of it is Python's garbage collector"
    if data >= EXPLAINED * excess:
        said = f"{longer}: {_ms(slowest.data)} a step pass before its next batch is there"
        return "data loading", said
    denied = slowest.denied - median(pace.denied for pace in others)
    crowded = slowest.crowded - median(pace.crowded for pace in others)
    if crowded * slowest.seconds >= EXPLAINED * excess and crowded > denied:
        said = f"{longer}: for {slowest.crowded:.0%} of the time its thread was ready and no core was free"
        return "loaded machine", said
    if denied > NOTEWORTHY * EXPLAINED:
        return "computing", f"{longer}: for {slowest.denied:.0%} of the time its quota of processor time was used up"
    return "computing", f"{longer}, with a core of its own"


def _behind_a_slow_link(paces: Sequence[RankPace]) -> Straggler | None:
    known = [pace for pace in paces if pace.rates]
    if len(known) < 3 or median(pace.waiting / pace.seconds for pace in paces if pace.seconds) < MUCH_WAITING:
        return None
    # What two ranks reach between them says nothing of which end is slow, and one of several connections may be slow by
    # chance, as where packets are lost: who is slow towards everybody, in both directions, is
    fastest = {pace.rank: max(own) for pace in known if len(own := _towards(pace.rank, known)) >= len(known) - 1}
    if not fastest:
        return None
    slowest = min((pace for pace in known if pace.rank in fastest), key=lambda pace: fastest[pace.rank])
    between = [
        rate for pace in known for peer, rate in (pace.rates or {}).items() if slowest.rank not in (pace.rank, peer)
    ]
    if not between or fastest[slowest.rank] > SLOWER_LINK * median(between):
        return None
    said = (
        f"its connections reach {_mbit(fastest[slowest.rank])} at most, those between the others "
        f"{_mbit(median(between))}, and all wait for the wire "
        f"{median(pace.waiting / pace.seconds for pace in paces):.0%} of the time"
    )
    return Straggler(slowest.rank, slowest.step, "link", said)


def _towards(rank: int, paces: Sequence[RankPace]) -> list[float]:
    """Rates of a rank's connections, in both directions."""
    mine = [rate for pace in paces if pace.rank == rank for rate in (pace.rates or {}).values()]
    return mine + [pace.rates[rank] for pace in paces if pace.rates and rank in pace.rates]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _mbit(bytes_per_second: float) -> str:
    return f"{8e-6 * bytes_per_second:.3g} Mbit/s"


# -- findings ----------------------------------------------------------------------------------------------------------
# Reads ranks' latest steps and vitals out of a store, and writes down who holds up the others.

WINDOW_SECONDS = 6.0  # of steps and vitals, before the newest
PROMPT_BATCHES = 2  # a rank that is slower by much in so many, of a second each, is named at once
PROMPT_VITALS_SECONDS = 2.5
MUCH = 2 * NOTEWORTHY
MOST_BATCHES = 16  # in a window
LINKS_SECONDS = 4.0  # more, of links: they are sampled every two seconds, and those to many peers less often
FULL_SAMPLES = 2  # of a connection, before its rate counts
WARM_UP_STEPS = 10  # of a run: what is made once is no straggler's work
AGAIN_SECONDS = 60.0  # before the same finding is written down once more
HANG = "hang"  # the cause of who is waited for where nobody goes on
OVER, HANG_OVER = "caught up", "went on"  # the events that end a finding, and a hang's
AWAY = ("lost", "left", "finished", "failed", "stopped", "saving")
SHARES = {"gc_seconds": "garbage", "throttled": "denied", "cpu_wait": "crowded"}
Batches = Mapping[int, Sequence[sqlite3.Row]]  # a rank's rows of steps, the newest first


def paces(db: sqlite3.Connection) -> list[RankPace]:
    """What the latest steps of the ranks consist of that train now, in order; empty before there are any."""
    batches = _batches(db)
    return _paces(db, batches, _newest(batches) - WINDOW_SECONDS)


def _batches(db: sqlite3.Connection) -> Batches:
    """Those of the latest seconds, of the ranks that train now."""
    ranks = [rank for rank, state in db.execute("SELECT rank, state FROM rank ORDER BY rank") if state not in AWAY]
    asked = "SELECT * FROM step WHERE rank = ? AND step > ? ORDER BY step DESC LIMIT ?"
    found = {rank: db.execute(asked, (rank, WARM_UP_STEPS, MOST_BATCHES)).fetchall() for rank in ranks}
    begin = _newest(found) - WINDOW_SECONDS
    recent = {rank: [row for row in rows if row["at"] > begin] for rank, rows in found.items()}
    return {rank: rows for rank, rows in recent.items() if rows}


def _newest(batches: Batches) -> float:
    return max((row["at"] for rows in batches.values() for row in rows), default=0.0)


def _paces(db: sqlite3.Connection, batches: Batches, vitals_begin: float) -> list[RankPace]:
    if not batches:
        return []
    vitals, heard, rates = (
        _vitals(db, vitals_begin),
        _heard(db),
        _rates(db, _newest(batches) - WINDOW_SECONDS - LINKS_SECONDS),
    )
    last = max(heard.values(), default=0.0)
    found = []
    for rank, rows in batches.items():
        steps = sum(row["steps"] for row in rows)
        own = {field: vitals.get((rank, name), 0.0) for name, field in SHARES.items()}
        seconds = sum(row["seconds"] for row in rows) / steps
        own["garbage"] *= seconds  # told as a share of the time
        found.append(
            RankPace(
                rank=rank,
                step=rows[0]["step"],
                seconds=seconds,
                waiting=sum(row["waiting"] or 0.0 for row in rows) / steps,
                data=sum(row["data"] or 0.0 for row in rows) / steps,
                silent_seconds=last - heard.get(rank, last),
                rates=rates.get(rank),
                **own,
            )
        )
    return found


def _named(db: sqlite3.Connection) -> Straggler | None:
    """By all steps of the window; or, where one rank is slower by much, by the newest ones, if those before say so too.

    What takes long once, as a checkpoint does, is in one batch, or in parts of two.
    """
    batches = _batches(db)
    newest = _newest(batches)
    found = straggler(_paces(db, batches, newest - WINDOW_SECONDS))
    if found is not None or any(len(rows) < PROMPT_BATCHES for rows in batches.values()):
        return found
    single = [{rank: [rows[back]] for rank, rows in batches.items()} for back in range(PROMPT_BATCHES)]
    each = [straggler(_paces(db, one, newest - PROMPT_VITALS_SECONDS), noteworthy=MUCH) for one in single]
    same = {None if one is None else (one.rank, one.cause) for one in each}
    return each[0] if len(same) == 1 else None


def _vitals(db: sqlite3.Connection, begin: float) -> dict[tuple[int, str], float]:
    rows = db.execute(
        "SELECT rank, name, avg(value) FROM vital WHERE name IN (?, ?, ?) AND rank IS NOT NULL AND at > ?"
        " GROUP BY name, rank",
        (*SHARES, begin),
    )
    return {(rank, name): value for rank, name, value in rows}


def _heard(db: sqlite3.Connection) -> dict[int, float]:
    """When each rank's process last told its vitals, as it does in whatever state it is unless it is stopped."""
    return dict(
        db.execute("SELECT rank, max(at) FROM vital WHERE name = 'cpu_share' AND rank IS NOT NULL GROUP BY rank")
    )


def _rates(db: sqlite3.Connection, begin: float) -> dict[int, dict[int, float]]:
    """Median rates of connections that were full more than once, by source and target: what others could do nobody has
    seen. What was measured as the group began is no rate of theirs under load."""
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    rows = db.execute(
        "SELECT source, target, bytes_per_second FROM link WHERE at > ? AND bytes_per_second > 0 AND used_bytes > 0",
        (begin,),
    )
    for source, target, rate in rows:
        seen[source, target].append(rate)
    rates: dict[int, dict[int, float]] = defaultdict(dict)
    for (source, target), each in seen.items():
        if len(each) >= FULL_SAMPLES:
            rates[source][target] = median(each)
    return dict(rates)


def look(db: sqlite3.Connection, at: float) -> Straggler | None:
    """Who holds up the others now; what is new of it is written down, its end too. Call within a transaction."""
    found, last = _named(db), _last(db)
    if found is None:
        if last is not None:
            content = json.dumps({"cause": last[2]})
            db.execute("INSERT INTO event(at, rank, kind, content) VALUES(?, ?, ?, ?)", (at, last[1], OVER, content))
    elif last is None or last[1:] != (found.rank, found.cause) or at - last[0] > AGAIN_SECONDS:
        row = (at, found.step, found.rank, found.cause, found.evidence)
        db.execute("INSERT INTO finding(at, step, rank, cause, evidence) VALUES(?, ?, ?, ?, ?)", row)
    return found


def _last(db: sqlite3.Connection) -> tuple[float, int, str] | None:
    """Moment, rank and cause of the straggler that has not caught up; only the latest can be."""
    asked = f"SELECT at, rank, cause FROM finding {NOT_OVER} AND cause != '{HANG}' ORDER BY at DESC, rowid DESC LIMIT 1"
    row = db.execute(asked).fetchone()
    return None if row is None else tuple(row)


NOT_OVER = f"""WHERE at > coalesce((SELECT max(event.at) FROM event
    WHERE kind = CASE finding.cause WHEN '{HANG}' THEN '{HANG_OVER}' ELSE '{OVER}' END), 0)"""
