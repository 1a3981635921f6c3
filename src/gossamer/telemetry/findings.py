"""Findings: reads ranks' latest steps and vitals out of a store, and writes down who holds up the others."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence

from gossamer.telemetry.stragglers import RankPace, Straggler, straggler

WINDOW_SECONDS = 6.0  # of steps and vitals, before the newest
LINKS_SECONDS = 4.0  # more, of links: they are sampled every two seconds, and those to many peers less often
WARM_UP_STEPS = 10  # of a run: what is made once is no straggler's work
AGAIN_SECONDS = 60.0  # before the same finding is written down once more
AWAY = ("lost", "left", "finished", "failed", "saving")
SHARES = {"gc_seconds": "garbage", "throttled": "denied", "cpu_wait": "crowded"}


def paces(db: sqlite3.Connection) -> list[RankPace]:
    """What the latest steps of the ranks consist of that train now, in order; empty before there are any."""
    newest = db.execute("SELECT max(at) FROM step").fetchone()[0]
    if newest is None:
        return []
    begin = newest - WINDOW_SECONDS
    away = {rank for rank, state in db.execute("SELECT rank, state FROM rank") if state in AWAY}
    rows = db.execute(
        "SELECT rank, max(step), sum(steps), sum(seconds), sum(waiting), sum(data) FROM step"
        " WHERE at > ? AND step > ? GROUP BY rank ORDER BY rank",
        (begin, WARM_UP_STEPS),
    )
    vitals, heard, rates = _vitals(db, begin), _heard(db), _rates(db, begin - LINKS_SECONDS)
    last = max(heard.values(), default=newest)
    found = []
    for rank, step, steps, seconds, waiting, data in rows:
        if rank in away or not steps:
            continue
        own = {field: vitals.get((rank, name), 0.0) for name, field in SHARES.items()}
        own["garbage"] *= seconds / steps  # told as a share of the time
        found.append(
            RankPace(
                rank=rank,
                step=step,
                seconds=seconds / steps,
                waiting=(waiting or 0.0) / steps,
                data=(data or 0.0) / steps,
                silent_seconds=last - heard.get(rank, last),
                rates=rates.get(rank),
                **own,
            )
        )
    return found


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
    """Rates of connections that were full, by source and target: what the others could do nobody has seen."""
    rates: dict[int, dict[int, float]] = defaultdict(dict)
    rows = db.execute(
        "SELECT source, target, avg(bytes_per_second) FROM link"
        " WHERE at > ? AND bytes_per_second > 0 GROUP BY source, target",
        (begin,),
    )
    for source, target, rate in rows:
        rates[source][target] = rate
    return dict(rates)


def look(db: sqlite3.Connection, at: float) -> Straggler | None:
    """Who holds up the others now, which is written down where it is new. Call within a transaction."""
    found = straggler(paces(db))
    if found is not None and _is_new(found, at, db.execute(LAST).fetchall()):
        row = (at, found.step, found.rank, found.cause, found.evidence)
        db.execute("INSERT INTO finding(at, step, rank, cause, evidence) VALUES(?, ?, ?, ?, ?)", row)
    return found


LAST = "SELECT at, rank, cause FROM finding ORDER BY at DESC LIMIT 1"


def _is_new(found: Straggler, at: float, last: Sequence[tuple[float, int, str]]) -> bool:
    return not last or tuple(last[0][1:]) != (found.rank, found.cause) or at - last[0][0] > AGAIN_SECONDS
