"""Numbers that are known to be right, kept as files; GOSSAMER_REWRITE_GOLDEN=1 writes them anew, and only then."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, found: Mapping[str, Sequence[float]], relative: float = 1e-9, folder: Path = FOLDER) -> None:
    """Compare lists of float64 with those of the file; what it says is exact, what is asked is `relative`."""
    path = folder / f"{name}.json"
    if os.environ.get("GOSSAMER_REWRITE_GOLDEN") == "1":
        written = {key: [value.hex() for value in values] for key, values in found.items()}
        path.write_text(json.dumps(written, indent=1) + "\n")
        return
    kept = {key: [float.fromhex(text) for text in texts] for key, texts in json.loads(path.read_text()).items()}
    assert found.keys() == kept.keys(), f"{path} is about {sorted(kept)}, not {sorted(found)}"
    for key, values in found.items():
        for place, (value, known) in enumerate(zip(values, kept[key], strict=True)):
            assert value == pytest.approx(known, rel=relative, abs=1e-12), (
                f"{name}, {key}: number {place} was {known!r} and is {value!r} now. Where that is meant, run the tests "
                "with GOSSAMER_REWRITE_GOLDEN=1 and say why in the changelog."
            )
