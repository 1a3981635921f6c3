"""Failures: which of the ends that came together caused the others."""

from __future__ import annotations

import sqlite3

TOGETHER_SECONDS = 60.0
RANKING = ("killed", "raised", "ended", "echo", "stopped")  # the likeliest cause first
# A rank that its launcher stopped though no rank had failed, because somebody asked the launcher to end, is no failure
NOT_ON_REQUEST = "NOT (kind = 'stopped' AND caused_by IS NULL)"
FOLLOWS = {"echo", "stopped"}
# What a launcher saw of a process that has said itself why it failed; only such rows have no traceback at all
EXIT_OF_A_REPORT = """
DELETE FROM failure WHERE traceback IS NULL AND EXISTS (
    SELECT 1 FROM failure AS told
    WHERE told.rank = failure.rank AND told.attempt = failure.attempt AND told.traceback IS NOT NULL
)
"""


def name_causes(db: sqlite3.Connection) -> None:
    """Fill in `caused_by`: of ends within a minute the likeliest cause, and of equally likely ones the first."""
    db.execute(EXIT_OF_A_REPORT)
    found = db.execute("SELECT rowid, * FROM failure WHERE kind != 'uncaught' ORDER BY at").fetchall()
    for row in found:
        near = [other for other in found if abs(other["at"] - row["at"]) <= TOGETHER_SECONDS]
        cause = min(near, key=lambda each: (RANKING.index(each["kind"]), each["at"]))
        if row["kind"] in FOLLOWS and cause["kind"] != "stopped" and cause["rank"] != row["rank"]:
            db.execute("UPDATE failure SET caused_by = ? WHERE rowid = ?", (cause["rank"], row["rowid"]))
