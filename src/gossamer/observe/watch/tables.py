"""Tables: what a run knows of its links, its tensors and its failures."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from gossamer.observe.control_sequences import without_controls
from gossamer.observe.telemetry.failures import NOT_ON_REQUEST
from gossamer.observe.watch.hops import drawn

PAIR = ("source", "target", "at", "round_trip", "bytes_per_second", "used_bytes", "retransmits", "rate_at_first")

Row = dict[str, Any]
MOST_DRAWINGS = 4
LONGEST_TEXT = 20_000  # characters of a traceback


def read_network(db: sqlite3.Connection) -> Row:
    """Pairs of ranks (a list per column, since they may be many) with the latest round trip (s), the latest rate at
    which they were full (bytes/s), and all that they sent; collectives picked, and drawn. rate_at_first: the connection
    was never full since the group began, and this is the rate measured then."""
    pairs = """SELECT source, target, max(at) AS at, round_trip, sum(used_bytes) AS used_bytes,
        sum(retransmits) AS retransmits FROM link GROUP BY source, target"""
    full = """SELECT source, target, bytes_per_second, max(at) AS at FROM link WHERE bytes_per_second IS NOT NULL
        GROUP BY source, target"""
    began = "SELECT source, target, min(at) AS at FROM link GROUP BY source, target"
    picked = "SELECT at, content FROM event WHERE kind = 'collective' ORDER BY id DESC LIMIT 200"
    rates = {(row["source"], row["target"]): (row["bytes_per_second"], row["at"]) for row in db.execute(full)}
    first = {(row["source"], row["target"]): row["at"] for row in db.execute(began)}
    found = []
    for row in db.execute(pairs):
        pair = row["source"], row["target"]
        rate, at = rates.get(pair, (None, None))
        found.append({**dict(row), "bytes_per_second": rate, "rate_at_first": rate is not None and at == first[pair]})
    by_size: dict[tuple[int, int], Row] = {}
    for row in db.execute(picked):
        content = _content(row["content"])
        nbytes, world = int(content.get("nbytes") or 0), int(content.get("world") or 0)
        by_size.setdefault((nbytes, world), {**content, "at": row["at"]})
    return {
        "pairs": {name: [row[name] for row in found] for name in PAIR},
        "collectives": [by_size[size] for size in sorted(by_size, reverse=True)],
        "drawings": _drawings(by_size.values()),
    }


def _drawings(picked: Iterable[Row]) -> list[Row]:
    """Each collective once, that of the most bytes first."""
    largest: dict[tuple[str, int], int] = {}
    for each in picked:
        key = str(each.get("collective")), int(each.get("world") or 0)
        largest[key] = max(largest.get(key, 0), int(each.get("nbytes") or 0))
    found = [
        {"collective": text, "world": world, "nbytes": nbytes, "pictures": drawn(text, world)}
        for (text, world), nbytes in sorted(largest.items(), key=lambda item: -item[1])
    ]
    return [each for each in found if each["pictures"]][:MOST_DRAWINGS]


def read_tensors(db: sqlite3.Connection) -> list[Row]:
    """Every tensor as its ranks last told of it: means over them, and bytes of one step of one rank."""
    latest = """SELECT name, rank, max(step) AS step, numel, bytes, residual_norm, gradient_norm, energy_share
        FROM tensor GROUP BY name, rank"""
    asked = f"""SELECT name, count(*) AS ranks, max(step) AS step, max(numel) AS numel, avg(bytes) AS bytes,
        avg(residual_norm) AS residual_norm, avg(gradient_norm) AS gradient_norm, avg(energy_share) AS energy_share
        FROM ({latest}) GROUP BY name ORDER BY avg(bytes) DESC"""
    return [dict(row) for row in db.execute(asked)]


def read_failures(db: sqlite3.Connection, limit: int = 300) -> list[Row]:
    """The failure that came first, and was no echo of another, on top; each with the ranks that it took along."""
    asked = f"SELECT * FROM failure WHERE {NOT_ON_REQUEST} ORDER BY caused_by IS NOT NULL, at, rank LIMIT ?"
    failures = [_readable(dict(row)) for row in db.execute(asked, (limit,))]
    for failure in failures:
        followed = [other for other in failures if other["caused_by"] is not None]
        failure["took"] = sorted({other["rank"] for other in followed if other["caused_by"] == failure["rank"]})
    return failures


def read_events(db: sqlite3.Connection, limit: int = 300) -> list[Row]:
    """The latest of what happens rarely, newest first."""
    asked = "SELECT * FROM event ORDER BY id DESC LIMIT ?"
    return [{**dict(row), "content": _content(row["content"])} for row in db.execute(asked, (limit,))]


def _readable(failure: Row) -> Row:
    for name in ("message", "traceback"):
        failure[name] = without_controls(str(failure[name] or "")[:LONGEST_TEXT])
    return failure


def _content(text: str | None) -> Row:
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {"text": text}
    return content if isinstance(content, dict) else {"text": content}
