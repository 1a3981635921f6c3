"""Environments: what ranks do not have in common, of versions, platforms and settings."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from gossamer.observe.control_sequences import without_controls
from gossamer.observe.watch.summary import read_ranks

MOST_CHARACTERS = 200  # that a page shows of a value


def read_differences(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """By name: {"name", "values": [{"value" (None: it has none), "ranks"}]}, the value that most have first."""
    told = {rank["rank"]: rank["environment"] for rank in read_ranks(db)}
    return differences({rank: each for rank, each in told.items() if isinstance(each, dict)})


def differences(environments: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """environments: by rank. Ranks that have told nothing are no part of them."""
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
