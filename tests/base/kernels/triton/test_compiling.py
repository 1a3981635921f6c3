"""Triton kernels compile for GPUs that are not here, to instructions that round as plain torch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

pytestmark = pytest.mark.timeout(900)  # two minutes of a processor, of which others may leave little

# Reference arithmetic of these is itself not exact; each docstring states its bound.
BOUNDED: dict[str, list[str]] = {}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    program = Path(__file__).with_name("compile_all.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["ampere", "hopper", "mi300"])
def test_every_kernel_compiles(answers: dict[str, dict[str, list[str]]], target: str) -> None:
    assert len(answers[target]) > 2


@pytest.mark.parametrize("target", ["ampere", "hopper"])
def test_no_instruction_fuses_or_approximates(answers: dict[str, dict[str, list[str]]], target: str) -> None:
    wrong = {name: found for name, found in answers[target].items() if not name.startswith("twin_") and found}
    assert wrong == BOUNDED


@pytest.mark.parametrize("target", ["ampere", "hopper"])
def test_instructions_of_broken_twins_are_found(answers: dict[str, dict[str, list[str]]], target: str) -> None:
    assert any("fma" in each for each in answers[target]["twin_fused"])
    assert any("div" in each for each in answers[target]["twin_approximate"])
