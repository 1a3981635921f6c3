"""Programs of benchmarks/ that compare a worker's CPU time, memory and start with DDP's or with an import of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.steps import DDP
from support.paths import BENCHMARKS, ROOT
from support.processes import of_this_checkout

pytestmark = [pytest.mark.nightly, pytest.mark.processes]


def output(program: str, *arguments: str) -> str:
    paths = os.pathsep.join([of_this_checkout()["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "GOSSAMER_QUIET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows(file: Path, program: str, *arguments: str) -> Any:
    output(program, "--workers", "2", "--json", str(file), *arguments)
    return json.loads(file.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks of memory from /proc")
def test_memory_counts_copies_of_the_model(tmp_path: Path) -> None:
    """DDP has at least the parameters, gradients and two moments of AdamW; a residual is two copies more than none."""
    options = ("--width", "1024", "--runs", "1", "--recipe", "Dense()", "--recipe", "TopK(0.01)")
    ddp, dense, sparse = rows(tmp_path / "rows.json", "memory.py", *options)
    assert ddp["recipe"] == DDP
    assert ddp["over_ddp"] == 0
    assert ddp["copies"] > 3.9
    assert sparse["over_ddp"] - dense["over_ddp"] > 1.5
    assert dense["parts"]["residuals"] == 0
    assert sparse["parts"]["residuals"] == pytest.approx(2, rel=0.01)


def test_steps_divides_the_cpu_time_of_a_step_into_activities(tmp_path: Path) -> None:
    options = ("--case", "small", "--rounds", "3", "--steps", "2", "--recipe", "Int8()")
    report = rows(tmp_path / "report.json", "steps.py", *options)
    ddp, int8 = report["cases"]["small"]
    assert (ddp["recipe"], int8["recipe"], int8["rounds"]) == (DDP, "Int8()", 3)
    assert ddp["ratio"] == 1
    assert ddp["activities"]["encode"] == 0 < int8["activities"]["encode"]
    assert sum(int8["activities"].values()) == pytest.approx(int8["cpu_ms"], rel=0.5)  # medians of each


def test_startup_measures_each_way_of_starting_workers() -> None:
    table = output("startup.py", "--workers", "2", "--rounds", "1")
    assert "Written from commit" in table
    assert [line.split("  ")[0] for line in table.splitlines()[-3:]] == ["import torch", "forks", "new programs"]
