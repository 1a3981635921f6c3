"""A step is short enough to be read: how many functions and files it passes through, with a ceiling for each recipe."""

from __future__ import annotations

import pytest
from support.step_walk import step_walk

SERVER_THREADS = ("gossamer worker 0", "gossamer script of worker 0")

# Recipe: (step, functions, files). Lower a ceiling where the step becomes shorter. Up to ten calls depend on which
# thread waits for the other one. A ceiling is the largest count of many runs; functions have one more.
CEILINGS = {
    "Dense()": (4, 154, 30),
    "TopK(0.05)": (4, 219, 41),
    "DiLoCo(period=4)": (7, 217, 47),
    "ParameterServer(mode='sync')": (4, 238, 53),
}


@pytest.mark.parametrize("recipe", CEILINGS)
def test_step_passes_through_no_more_functions_and_files_than_the_ceiling(recipe: str) -> None:
    step, functions, files = CEILINGS[recipe]
    walk = step_walk(recipe, step, SERVER_THREADS)
    assert walk.functions <= functions, walk
    assert walk.files <= files, walk
    assert walk.functions > functions // 2, "this test sees only a part of the step"
