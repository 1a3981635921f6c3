"""Stragglers: names the rank that all others wait for, and the cause.

In lock step the steps of all ranks take equally long, and only their parts differ: the slowest rank waits least. So a
straggler is identified by its own work, not by its step time.

    rank 0   work ####          waiting ######          rank 2 is named: its work exceeds the others' by their waiting
    rank 1   work #####         waiting #####           time, and most of the excess is data loading
    rank 2   data ###### work ####

`look` applies this rule to the latest rows of a store, and writes its findings.
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

NOTEWORTHY = 0.2  # of a step; less is noise between equal machines
EXPLAINED = 0.5  # of the excess that the others' waiting or a counter must account for
MUCH_LONGER = 1.5  # times the others' work, from which shares by speed are proposed
SLOWER_LINK = 0.6  # of the median rate between the other ranks
MUCH_WAITING = 0.3  # of a step; with less waiting a slow link has no cost
SILENT_STEPS, SILENT_SECONDS = 5.0, 5.0  # vitals come every two seconds


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """Parts of a rank's step, averaged over the same few steps of all ranks: seconds per step."""

    rank: int
    step: int  # the last one
    seconds: float
    waiting: float  # of the training thread, for others or for the wire
    data: float = 0.0  # between a step's end and the next forward pass
    garbage: float = 0.0  # in the garbage collector
    denied: float = 0.0  # share of time that its cgroup was throttled
    crowded: float = 0.0  # share of time that its training thread was ready without a core
    silent_seconds: float = 0.0  # since the last report of its process
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
    """Find the straggler; None without one, or with a single rank.

    Args:
        paces: of the ranks, over the same steps.
        noteworthy: minimum excess of its work, as a fraction of a step.

    law:    at most one rank is named, and its work exceeds the others' median by more than that
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
    text = f"its process has not reported for {last.silent_seconds:.1f} s, and all others have"
    return Straggler(last.rank, last.step, "stopped", text)


def _slow(paces: Sequence[RankPace], noteworthy: float) -> Straggler | None:
    slowest = max(paces, key=lambda pace: pace.work)
    others = [pace for pace in paces if pace is not slowest]
    excess = slowest.work - median(pace.work for pace in others)
    waited = median(pace.waiting for pace in others) - slowest.waiting
    if excess < noteworthy * median(pace.seconds for pace in paces) or waited < EXPLAINED * excess:
        return None
    cause, evidence = _why(slowest, others, excess)
    return Straggler(slowest.rank, slowest.step, cause, evidence + _remedy(slowest, others))


def _why(slowest: RankPace, others: Sequence[RankPace], excess: float) -> tuple[Cause, str]:
    data = slowest.data - median(pace.data for pace in others)
    garbage = slowest.garbage - median(pace.garbage for pace in others)
    longer = f"its own work takes {_ms(excess)} per step longer than the others'"
    if garbage >= EXPLAINED * excess:
        return "garbage collection", f"{longer}, and {_ms(garbage)} of it is Python's garbage collector"
    if data >= EXPLAINED * excess:
        text = f"{longer}: it waits {_ms(slowest.data)} per step for its next batch"
        return "data loading", text
    denied = slowest.denied - median(pace.denied for pace in others)
    crowded = slowest.crowded - median(pace.crowded for pace in others)
    if crowded * slowest.seconds >= EXPLAINED * excess and crowded > denied:
        text = f"{longer}: its thread was ready without a free core for {slowest.crowded:.0%} of the time"
        return "loaded machine", text
    if denied > NOTEWORTHY * EXPLAINED:
        return "computing", f"{longer}: its CPU quota was used up for {slowest.denied:.0%} of the time"
    return "computing", f"{longer}, although it has its own core"


def _remedy(slowest: RankPace, others: Sequence[RankPace]) -> str:
    """The proposal to divide work by speed, and its gain, if the slowest rank takes much longer."""
    times = slowest.work / max(median(pace.work for pace in others), 1e-9)
    if times < MUCH_LONGER:
        return ""
    from gossamer.algorithms.strategies.forms_by_speed import proposal  # imported late: it imports all strategies

    works = [max(pace.work, 1e-9) for pace in (slowest, *others)]
    return f". It takes {times:.1f} times as long as the others, so {proposal(works)}"


def _behind_a_slow_link(paces: Sequence[RankPace]) -> Straggler | None:
    known = [pace for pace in paces if pace.rates]
    if len(known) < 3 or median(pace.waiting / pace.seconds for pace in paces if pace.seconds) < MUCH_WAITING:
        return None
    # A rate between two ranks does not identify the slow end, and one connection may be slow by chance, such as through
    # packet loss. A rank that is slow with all others, in both directions, has the slow link
    fastest = {
        pace.rank: max(peer_rates) for pace in known if len(peer_rates := _towards(pace.rank, known)) >= len(known) - 1
    }
    if not fastest:
        return None
    slowest = min((pace for pace in known if pace.rank in fastest), key=lambda pace: fastest[pace.rank])
    between = [
        rate for pace in known for peer, rate in (pace.rates or {}).items() if slowest.rank not in (pace.rank, peer)
    ]
    if not between or fastest[slowest.rank] > SLOWER_LINK * median(between):
        return None
    text = (
        f"its connections reach at most {_mbit(fastest[slowest.rank])}, those between the others "
        f"{_mbit(median(between))}, and all wait for the network "
        f"{median(pace.waiting / pace.seconds for pace in paces):.0%} of the time"
    )
    return Straggler(slowest.rank, slowest.step, "link", text)


def _towards(rank: int, paces: Sequence[RankPace]) -> list[float]:
    """Rates of a rank's connections, in both directions."""
    local = [rate for pace in paces if pace.rank == rank for rate in (pace.rates or {}).values()]
    return local + [pace.rates[rank] for pace in paces if pace.rates and rank in pace.rates]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _mbit(bytes_per_second: float) -> str:
    return f"{8e-6 * bytes_per_second:.3g} Mbit/s"


# -- findings ----------------------------------------------------------------------------------------------------------
# Finds the current straggler from the latest steps and vitals of a store, and writes a finding.

WINDOW_SECONDS = 6.0  # of steps and vitals, before the newest
PROMPT_BATCHES = 2  # a much slower rank is named after this many batches, of a second each
PROMPT_VITALS_SECONDS = 2.5
MUCH = 2 * NOTEWORTHY
MOST_BATCHES = 16  # in a window
LINKS_SECONDS = 4.0  # additional, for links: they are sampled every two seconds, less often with many peers
FULL_SAMPLES = 2  # of a connection before its rate counts
WARM_UP_STEPS = 10  # of a run: one-time work does not make a straggler
AGAIN_SECONDS = 60.0  # before the same finding is written again
HANG = "hang"  # the cause in a finding of a hang
OVER, HANG_OVER = "caught up", "went on"  # the events that end a finding, and a hang's
AWAY = ("lost", "left", "finished", "failed", "stopped", "saving")
SHARES = {"gc_seconds": "garbage", "throttled": "denied", "cpu_wait": "crowded"}
Batches = Mapping[int, Sequence[sqlite3.Row]]  # a rank's rows of steps, the newest first


def paces(db: sqlite3.Connection) -> list[RankPace]:
    """Paces of the training ranks over the latest steps, in order; empty before the first steps."""
    batches = _batches(db)
    return _paces(db, batches, _newest(batches) - WINDOW_SECONDS)


def _batches(db: sqlite3.Connection) -> Batches:
    """Latest rows of the ranks that train now."""
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
    vitals, last_reports, rates = (
        _vitals(db, vitals_begin),
        _last_vitals(db),
        _rates(db, _newest(batches) - WINDOW_SECONDS - LINKS_SECONDS),
    )
    last = max(last_reports.values(), default=0.0)
    found = []
    for rank, rows in batches.items():
        steps = sum(row["steps"] for row in rows)
        shares = {field: vitals.get((rank, name), 0.0) for name, field in SHARES.items()}
        seconds = sum(row["seconds"] for row in rows) / steps
        shares["garbage"] *= seconds  # reported as a share of the time
        found.append(
            RankPace(
                rank=rank,
                step=rows[0]["step"],
                seconds=seconds,
                waiting=sum(row["waiting"] or 0.0 for row in rows) / steps,
                data=sum(row["data"] or 0.0 for row in rows) / steps,
                silent_seconds=last - last_reports.get(rank, last),
                rates=rates.get(rank),
                **shares,
            )
        )
    return found


def _named(db: sqlite3.Connection) -> Straggler | None:
    """Straggler over the whole window; or over the newest batches, if one rank is much slower and earlier ones agree.

    One-time work such as a checkpoint is in one batch, or in parts of two.
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


def _last_vitals(db: sqlite3.Connection) -> dict[int, float]:
    """Time of each rank's last vitals. A process reports them in any state unless it is stopped."""
    return dict(
        db.execute("SELECT rank, max(at) FROM vital WHERE name = 'cpu_share' AND rank IS NOT NULL GROUP BY rank")
    )


def _rates(db: sqlite3.Connection, begin: float) -> dict[int, dict[int, float]]:
    """Median rates of connections that were saturated more than once, by source and target. Unsaturated ones have no
    known capacity. The measurement at the group's begin is not a rate under load, and is ignored."""
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
    """Find the current straggler. Write a new finding, or its end. Call it within a transaction."""
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
    """Time, rank and cause of the latest straggler that has not caught up."""
    asked = f"SELECT at, rank, cause FROM finding {NOT_OVER} AND cause != '{HANG}' ORDER BY at DESC, rowid DESC LIMIT 1"
    row = db.execute(asked).fetchone()
    return None if row is None else tuple(row)


NOT_OVER = f"""WHERE at > coalesce((SELECT max(event.at) FROM event
    WHERE kind = CASE finding.cause WHEN '{HANG}' THEN '{HANG_OVER}' ELSE '{OVER}' END), 0)"""
