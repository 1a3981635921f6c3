"""benchmarks/frameworks.py: one model sends the same bytes per step in every framework, and other bytes are marked."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from benchmarks.frameworks import FRAMEWORKS, RECIPES, Measured, bytes_table, measure, overhead_table


def invented(**sent: float) -> Measured:
    return {
        name: {recipe: {"bytes": count, "overheads": [1.0, 1.1, 1.2]} for recipe in RECIPES}
        for name, count in sent.items()
    }


@pytest.mark.processes
@pytest.mark.new_programs
@pytest.mark.timeout(900)
def test_every_framework_sends_the_bytes_of_torch() -> None:
    for library in ("keras", "jax", "tensorflow"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    measured, versions = measure(timed=False)
    assert [*measured] == [name for group in FRAMEWORKS.values() for name in group]
    assert "differs" not in bytes_table(measured)
    dense, topk, diloco = (measured["torch"][recipe]["bytes"] for recipe in RECIPES)
    assert dense > 4 * 20_752 > 10 * topk > 10 * diloco > 0
    assert {"torch", "keras", "jax", "tensorflow-cpu"} == {*versions}


def test_cells_that_differ_from_torch_are_marked() -> None:
    lines = bytes_table(invented(torch=1000.0, JAX=1000.0, Keras=1000.5)).splitlines()
    assert [line.count("differs") for line in lines] == [0, 0, 0, 0, len(RECIPES)]
    assert "1,000.5" in lines[-1]


def test_overheads_are_medians_with_quartiles() -> None:
    assert "| 1.10 (1.00 to 1.20) |" in overhead_table(invented(torch=1.0))
