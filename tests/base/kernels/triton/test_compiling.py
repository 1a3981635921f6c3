"""Triton kernels compile for GPUs that are not here, to instructions that round as plain torch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

# Reference arithmetic of these is itself not exact; each docstring states its bound.
BOUNDED: dict[str, list[str]] = {}


def compiled(cache: Path, *arguments: str) -> dict[str, dict[str, list[str]]]:
    """Inexact instructions by target and kernel."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("compile_all.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, list[str]]) -> None:
    assert {name: each for name, each in found.items() if not name.startswith("twin_") and each} == BOUNDED
    assert any("fma" in each for each in found["twin_fused"])
    assert any("div" in each for each in found["twin_approximate"])


def test_each_kernel_compiles_and_rounds_as_torch(tmp_path: Path) -> None:
    """Each kernel once, for one GPU; every family of kernels has at least one."""
    (found,) = compiled(tmp_path, "--once", "hopper").values()
    families = Path(__file__).parent.glob("cases_*.py")
    assert len(found) > len(list(families))
    check(found)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_specializations_compile_for_all_targets(tmp_path: Path) -> None:
    """Two minutes of a processor."""
    answers = compiled(tmp_path)
    assert set(answers) == {"ampere", "hopper", "mi300"}
    assert all(set(found) == set(answers["hopper"]) for found in answers.values())
    check(answers["ampere"])
    check(answers["hopper"])
