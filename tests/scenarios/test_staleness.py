"""The benchmark of staleness gives the numbers that docs/benchmarks/staleness.md prints, on any machine."""

from __future__ import annotations

import runpy
from functools import partial
from typing import Any

import pytest
from support.paths import BENCHMARKS

pytestmark = pytest.mark.nightly

DOCS = BENCHMARKS.parent / "docs" / "benchmarks" / "staleness.md"


@pytest.mark.parametrize("text", ["ParameterServer('stale', staleness=4)", "ParameterServer('sync')"])
def test_the_table_is_what_the_benchmark_prints(text: str) -> None:
    program: dict[str, Any] = runpy.run_path(str(BENCHMARKS / "staleness.py"))
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{text}` | 1"))
    for name in ("one_slow", "now_and_then"):
        steps = program["measured"](text, 4, partial(program[name], 4), 60.0)
        assert f"| {', '.join(map(str, steps))} |" in row
