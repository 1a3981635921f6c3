"""Kept runs: one JSON file, whole at any moment."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[Any]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def write(path: Path, record: dict[str, Any]) -> None:
    """Whoever stops the program leaves the last record, or this one, and never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
    part.replace(path)
