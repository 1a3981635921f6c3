"""Session checkpoint: what of a session is saved, and what may be loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.errors import CheckpointError


def refuse_misfit(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a session's saved state that belongs to another run."""
    for key in ("recipe", "layout", "world", "rank"):
        if state[key] != mine[key]:
            raise CheckpointError(
                f"this checkpoint's {key} is {state[key]!r}, this session's is {mine[key]!r}: what was remembered "
                "would not fit. Run with what it was written with, or begin in an empty directory."
            )
