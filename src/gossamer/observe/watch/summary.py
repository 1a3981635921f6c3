"""Summary: a run's facts and progress, and the state of each rank; cheap enough for one query per second."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

import numpy as np

from gossamer.base.json_text import read_json
from gossamer.observe.control_sequences import without_controls
from gossamer.observe.telemetry.stragglers import HANG, NOT_OVER

Row = dict[str, Any]
LATEST_ROWS = 20  # of a rank, for its pace
LATEST = """
    SELECT max(step) AS step, max(at) AS at, sum(steps) AS steps, sum(seconds) AS seconds, sum(compute) AS compute,
    sum(encode) AS encode, sum(wire) AS wire, sum(decode) AS decode, sum(waiting) AS waiting, sum(data) AS data,
    sum(bytes_sent) AS bytes_sent FROM (SELECT * FROM step WHERE rank = ? ORDER BY step DESC LIMIT ?)
"""
BY_SPEED = ("share", "local_steps")  # metrics of ranks that divide the work by speed: of a step, or per period
GONE = ("lost", "left", "failed")  # states of ranks that an elastic run continues without
LAST_METRIC = "SELECT value, step FROM metric WHERE name = ? AND rank = ? ORDER BY step DESC LIMIT 1"
PACE = ("seconds", "compute", "encode", "wire", "decode", "waiting", "data", "bytes_sent")
VITAL_NAMES = """
    WITH RECURSIVE known(name) AS (
        SELECT min(name) FROM vital UNION ALL
        SELECT (SELECT min(name) FROM vital WHERE name > known.name) FROM known WHERE known.name IS NOT NULL
    ) SELECT name FROM known WHERE name IS NOT NULL
"""
RECENT_SECONDS = 120.0  # every machine reports within this time


def read_run(db: sqlite3.Connection) -> Row:
    return {row["key"]: _value(row["value"]) for row in db.execute("SELECT key, value FROM run")}


def _value(text: str | None) -> Any:
    try:
        return read_json(text or "null")
    except ValueError:
        return text  # incomplete or edited by hand: shown unchanged


def read_ranks(db: sqlite3.Connection) -> list[Row]:
    """Each rank with its pace, per-step means of its last rows, its position in training, and its part of the work if
    that follows its speed."""
    ranks = []
    for row in db.execute("SELECT * FROM rank ORDER BY rank"):
        rank = dict(row)
        rank["environment"] = _value(rank["environment"])
        rank["waits_for"] = without_controls(rank["waits_for"] or "") or None
        latest = db.execute(LATEST, (rank["rank"], LATEST_ROWS)).fetchone()
        steps = latest["steps"] or 0
        rank |= {"step": latest["step"], "at": latest["at"]}
        rank["pace"] = {name: (latest[name] or 0.0) / steps for name in PACE} if steps else None
        for name in BY_SPEED:
            part = db.execute(LAST_METRIC, (name, rank["rank"])).fetchone()
            rank[name] = None if part is None else part["value"]
        ranks.append(rank)
    return ranks


def read_findings(db: sqlite3.Connection, limit: int = 50) -> list[Row]:
    """Stragglers, the latest of each rank and cause first, with the number of findings, and whether it is current."""
    # Not GROUP BY with max() and min(): SQLite then takes step and evidence from any of both rows
    asked = """SELECT rank, cause, at, step, evidence, times, first FROM (
            SELECT *, row_number() OVER (same ORDER BY at DESC, rowid DESC) AS place, count(*) OVER same AS times,
            min(at) OVER same AS first FROM finding WINDOW same AS (PARTITION BY rank, cause)
        ) WHERE place = 1 ORDER BY at DESC LIMIT ?"""
    latest = f"SELECT rank, cause, max(at) FROM finding {NOT_OVER} GROUP BY cause = '{HANG}'"
    lasting = {(rank, cause) for rank, cause, _ in db.execute(latest)}
    return [
        {
            **row,
            "evidence": without_controls(row["evidence"] or ""),
            "now": (row["rank"], row["cause"]) in lasting,
        }
        for row in map(dict, db.execute(asked, (limit,)))
    ]


def read_vitals(db: sqlite3.Connection, ranks: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """The latest sample of every vital: {"ranks": {rank: {name: value}}, "machines": {machine: {name: value}}}."""
    of_ranks: dict[str, dict[str, float]] = {}
    of_machines: dict[str, dict[str, float]] = {}
    for (name,) in db.execute(VITAL_NAMES).fetchall():
        of_rank = "SELECT value FROM vital WHERE name = ? AND rank = ? ORDER BY at DESC LIMIT 1"
        for rank in ranks:
            for (value,) in db.execute(of_rank, (name, rank["rank"])):
                of_ranks.setdefault(str(rank["rank"]), {})[name] = value
        of_machine = """SELECT machine, value, max(at) FROM vital WHERE name = :name AND rank IS NULL AND at >=
            (SELECT max(at) FROM vital WHERE name = :name AND rank IS NULL) - :seconds GROUP BY machine"""
        for machine, value, _ in db.execute(of_machine, {"name": name, "seconds": RECENT_SECONDS}):
            of_machines.setdefault(str(machine), {})[name] = value
    return {"ranks": of_ranks, "machines": of_machines}


def summarize(db: sqlite3.Connection) -> Row:
    """Numbers of a run's head line, its ranks, and the counts of rare events. failures: root failures only."""
    run, ranks = read_run(db), read_ranks(db)
    paces = [rank["pace"] for rank in ranks if rank["pace"]]
    means = {name: float(np.mean([pace[name] for pace in paces])) for name in PACE} if paces else None
    lowest = sorted(ranks, key=lambda rank: (rank["state"] in GONE, rank["rank"]))
    losses = (db.execute(LAST_METRIC, ("loss", rank["rank"])).fetchone() for rank in lowest)
    loss = next((row for row in losses if row is not None), None)
    (failures,) = db.execute("SELECT count(*) FROM failure WHERE caused_by IS NULL AND kind != 'stopped'").fetchone()
    (findings,) = db.execute("SELECT count(*) FROM (SELECT DISTINCT rank, cause FROM finding)").fetchone()
    moments = [rank["at"] for rank in ranks if rank["at"] is not None]
    return {
        "run": run,
        "ranks": ranks,
        "ended": run.get("how") if run.get("ended") is not None else None,
        "step": max((rank["step"] for rank in ranks if rank["step"] is not None), default=None),
        "latest": max(moments, default=None),
        "pace": means,
        "loss": None if loss is None else {"value": loss["value"], "step": loss["step"]},
        "failures": failures,
        "findings": findings,
    }


# -- environments ------------------------------------------------------------------------------------------------------
# Differences between ranks, of versions, platforms and settings.

MOST_CHARACTERS = 200  # of a value on the page


def read_differences(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """By name: {"name", "values": [{"value" (null: not set), "ranks"}]}, the most common value first."""
    reported = {rank["rank"]: rank["environment"] for rank in read_ranks(db)}
    return differences({rank: each for rank, each in reported.items() if isinstance(each, dict)})


def differences(environments: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """environments: by rank. Ranks without a report are ignored."""
    found = []
    for name in sorted({name for each in environments.values() for name in each}):
        ranks: dict[str | None, list[int]] = {}
        for rank, each in environments.items():
            value = without_controls(str(each[name])[:MOST_CHARACTERS]) if name in each else None
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            values = sorted(ranks.items(), key=lambda one: (-len(one[1]), one[1]))
            found.append(
                {"name": without_controls(name), "values": [{"value": value, "ranks": who} for value, who in values]}
            )
    return found
