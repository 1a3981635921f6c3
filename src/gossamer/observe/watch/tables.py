"""Tables: a run's links, collectives, tensors, failures, events and printed lines."""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gossamer.algorithms.collectives import COLLECTIVES, Collective, Does
from gossamer.base.json_text import read_json
from gossamer.observe.control_sequences import without_controls
from gossamer.observe.telemetry.store import NOT_ON_REQUEST

PAIR = (
    "source",
    "target",
    "at",
    "round_trip",
    "bytes_per_second",
    "used_bytes",
    "retransmits",
    "through",
    "rate_at_first",
)

Row = dict[str, Any]
MOST_DRAWINGS = 4
LONGEST_TEXT = 20_000  # characters of a traceback


def read_network(db: sqlite3.Connection) -> Row:
    """Pairs of ranks (a list per column, since they may be many) with the latest round trip (s), the latest rate while
    saturated (bytes/s), all bytes sent, and the relay (null for a direct connection); picked collectives, and their
    drawings. rate_at_first: the connection was never saturated since the group began, and the rate is the initial
    measurement."""
    pairs = """SELECT source, target, max(at) AS at, round_trip, sum(used_bytes) AS used_bytes,
        sum(retransmits) AS retransmits, through FROM link GROUP BY source, target"""
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
    """Each collective once, for its largest number of bytes first."""
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
    """Every tensor in its last report: means over ranks, and bytes of one step of one rank."""
    latest = """SELECT name, rank, max(step) AS step, numel, bytes, residual_norm, gradient_norm, energy_share
        FROM tensor GROUP BY name, rank"""
    asked = f"""SELECT name, count(*) AS ranks, max(step) AS step, max(numel) AS numel, avg(bytes) AS bytes,
        avg(residual_norm) AS residual_norm, avg(gradient_norm) AS gradient_norm, avg(energy_share) AS energy_share
        FROM ({latest}) GROUP BY name ORDER BY avg(bytes) DESC"""
    return [dict(row) for row in db.execute(asked)]


def read_failures(db: sqlite3.Connection, limit: int = 300) -> list[Row]:
    """The root failure first; each failure with the ranks that it caused to end."""
    asked = f"SELECT * FROM failure WHERE {NOT_ON_REQUEST} ORDER BY caused_by IS NOT NULL, at, rank LIMIT ?"
    failures = [_readable(dict(row)) for row in db.execute(asked, (limit,))]
    for failure in failures:
        followed = [other for other in failures if other["caused_by"] is not None]
        failure["took"] = sorted({other["rank"] for other in followed if other["caused_by"] == failure["rank"]})
    return failures


def read_events(db: sqlite3.Connection, limit: int = 300) -> list[Row]:
    """The latest rare events, newest first."""
    asked = "SELECT * FROM event ORDER BY id DESC LIMIT ?"
    return [{**dict(row), "content": _content(row["content"])} for row in db.execute(asked, (limit,))]


def _readable(failure: Row) -> Row:
    for name in ("message", "traceback"):
        failure[name] = without_controls(str(failure[name] or "")[:LONGEST_TEXT])
    return failure


def _content(text: str | None) -> Row:
    try:
        content = read_json(text or "{}")
    except ValueError:
        return {"text": text}
    return content if isinstance(content, dict) else {"text": content}


# -- hops --------------------------------------------------------------------------------------------------------------
# Messages of each round between ranks; equal rounds are one picture.

MOST_RANKS = 64
MOST_CHARACTERS = 1000
MAKERS = {getattr(make, "__name__", ""): make for make in COLLECTIVES.values()}
MEANS = {Does.ADD: "add", Does.KEEP: "copy"}

Drawing = dict[str, Any]


def drawn(text: str, world: int) -> list[Drawing] | None:
    """Pictures of a collective among `world` ranks, in order.

    Args:
        text: its repr, which is parsed and never evaluated.
        world: number of ranks.

    Returns:
        Dicts {first, last: rounds; does: "add" or "copy"; hops: pairs of sender and receiver; share: fraction of the
        tensor in the largest message of a round}; None for other texts, and for more than 64 ranks.
    """
    made = _made(text)
    if made is None or not 1 < world <= MOST_RANKS:
        return None
    try:
        return _pictures(made, world)
    except (TypeError, ValueError):  # settings for another number of ranks
        return None


def _pictures(made: Collective, world: int) -> list[Drawing]:
    pieces = made.pieces(world)
    rounds: dict[tuple[int, str], dict[tuple[int, int], int]] = {}
    for rank in range(world):
        for hop in made.hops(rank, world):
            if hop.does in MEANS:
                pairs = rounds.setdefault((hop.round, MEANS[hop.does]), {})
                pairs[hop.peer, rank] = pairs.get((hop.peer, rank), 0) + len(hop.pieces)
    found: list[Drawing] = []
    for (number, does), pairs in sorted(rounds.items()):
        drawing = {"first": number, "last": number, "does": does, "hops": sorted(map(list, pairs))}
        if found and all(found[-1][name] == drawing[name] for name in ("does", "hops")):
            found[-1]["last"] = number
        else:
            found.append(drawing | {"share": max(pairs.values()) / pieces})
    return found


def _made(text: str) -> Collective | None:
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        settings = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return MAKERS[call.func.id](**settings)
    except (SyntaxError, KeyError, TypeError, ValueError, RecursionError, MemoryError):
        return None


# -- log lines ---------------------------------------------------------------------------------------------------------
# Printed lines of ranks and launchers, merged by time, filtered, in pages.

LONGEST_LINE = 4000  # characters of a line on the page
MOST_LINES = 1000
LEVELS = {"info": ("info", "warning", "error"), "warning": ("warning", "error"), "error": ("error",)}


@dataclass(frozen=True, kw_only=True)
class LogFilter:
    """Filter of lines: by rank (-1: the launcher), by minimum level, and by text (ASCII case-insensitive)."""

    rank: int | None = None
    level: str = "info"
    text: str = ""


def read_lines(
    db: sqlite3.Connection, wanted: LogFilter, *, before: int | None = None, after: int | None = None, limit: int = 200
) -> list[dict[str, Any]]:
    """The latest lines with an id below `before`, or the first ones above `after`; ordered by time.

    A line is cut after LONGEST_LINE characters, with the number of missing ones in `more`, and has no terminal control
    sequences.
    """
    marks = ", ".join("?" * len(LEVELS.get(wanted.level, LEVELS["info"])))
    conditions: list[tuple[str, tuple[Any, ...]]] = [
        (f"coalesce(level, 'info') IN ({marks})", LEVELS.get(wanted.level, LEVELS["info"]))
    ]
    if wanted.rank is not None:
        conditions.append(("rank IS NULL", ()) if wanted.rank < 0 else ("rank = ?", (wanted.rank,)))
    if wanted.text:
        conditions.append(("instr(lower(text), lower(?)) > 0", (wanted.text,)))
    if before is not None:
        conditions.append(("id < ?", (before,)))
    if after is not None:
        conditions.append(("id > ?", (after,)))
    asked = f"""SELECT id, at, rank, attempt, stream, level, substr(text, 1, {LONGEST_LINE}) AS text,
        max(0, length(text) - {LONGEST_LINE}) AS more FROM log WHERE {" AND ".join(each for each, _ in conditions)}
        ORDER BY id {"ASC" if after is not None else "DESC"} LIMIT ?"""
    values = [value for _, given in conditions for value in given]
    lines = [dict(row) for row in db.execute(asked, (*values, max(1, min(limit, MOST_LINES))))]
    for line in lines:
        line["text"] = without_controls(line["text"] or "")
    return sorted(lines, key=lambda line: (line["at"] or 0.0, line["id"]))
