"""Log lines: what ranks and launchers printed, merged by time, filtered, a page at a time."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from gossamer.observe.control_sequences import without_controls

LONGEST_LINE = 4000  # characters that a page shows of a line
MOST_LINES = 1000
LEVELS = {"info": ("info", "warning", "error"), "warning": ("warning", "error"), "error": ("error",)}


@dataclass(frozen=True, kw_only=True)
class LogFilter:
    """Which lines: of a rank (-1: the launcher's), from a level on, that hold a text (without regard to ASCII case)."""

    rank: int | None = None
    level: str = "info"
    text: str = ""


def read_lines(
    db: sqlite3.Connection, wanted: LogFilter, *, before: int | None = None, after: int | None = None, limit: int = 200
) -> list[dict[str, Any]]:
    """The latest lines with an id below `before`, or the first ones above `after`; ordered by time.

    A line is cut after LONGEST_LINE characters, with what it lacks in `more`, and steers no terminal.
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
