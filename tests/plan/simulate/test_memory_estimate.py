"""What all workers need, before they begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.plan.simulate import SimulationError
from gossamer.plan.simulate.memory_estimate import estimate_memory, free_bytes

PARAMETERS = 10_000_000


@pytest.mark.parametrize(("recipe", "residuals"), [("Dense()", 0.0), ("TopK(density=0.01)", 4.0)])
def test_each_worker_has_its_own(recipe: str, residuals: float) -> None:
    resolved = resolve(recipe, 8)
    found = estimate_memory(resolved, assumed(PARAMETERS, resolved), 8)
    assert found.parts["model"] == found.parts["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.05)
    assert found.parts["residuals"] == pytest.approx(residuals * PARAMETERS, rel=0.05)
    assert found.total_bytes == 8 * sum(found.parts.values())
    assert ("residuals" in str(found)) == bool(residuals)


def test_a_refusal_says_how_many_workers_fit() -> None:
    resolved = resolve("Dense()", 64)
    found = estimate_memory(resolved, assumed(PARAMETERS, resolved), 64)
    found.refuse_beyond(2 * found.total_bytes)
    with pytest.raises(SimulationError, match=r"64 workers would need .*Write --workers \d+") as refused:
        found.refuse_beyond(found.total_bytes / 2)
    fitting = re.search(r"--workers (\d+)", str(refused.value))
    assert fitting is not None
    assert int(fitting[1]) * found.worker_bytes < found.total_bytes / 2
    with pytest.raises(SimulationError, match="Take a smaller model"):
        found.refuse_beyond(found.worker_bytes)


def test_memory_is_free_as_far_as_the_control_group_allows(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    assert free_bytes(tmp_path) == float("inf")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    2000 kB\n")
    (group / "memory.current").write_text("500000\n")
    (group / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == 2_048_000
    (group / "memory.max").write_text("1500000\n")
    assert free_bytes(tmp_path) == 1_000_000
