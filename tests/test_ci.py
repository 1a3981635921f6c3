"""What CI runs: its last line says what passed, what failed, and how many tests nobody ran."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT

PURE = "=== 7400 passed, 3 skipped, 1 xfailed in 200.11s (0:03:20) ==="
IN_TURN = "====== 110 passed, 60 skipped in 343.00s (0:05:43) ======"
# The check waits until the sanitizers begin, and they until it does: one after the other, neither would end.
BESIDE = "case $1 in sanitize) echo >began;; check) read _ <began;; esac\n"
Ci = Callable[..., tuple[int, str]]


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    """Runs a copy of .ci/run beside a `make` that says what it is told: (exit code, last line)."""

    def run(*said: str, fails: str = "nothing") -> tuple[int, str]:
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
        for name in ("mpirun", "ip", "chromium", "make"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        lines = "\n".join(said)
        os.mkfifo(tmp_path / "began")
        text = f"#!/bin/sh\n{BESIDE}if [ $1 = test ]; then cat <<'END'\n{lines}\nexits\nEND\nfi\n[ $1 != {fails} ]\n"
        (tmp_path / "make").write_text(text)
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, done.stdout.splitlines()[-1]

    return run


def test_tests_that_were_skipped_are_counted_in_both_passes(ci: Ci) -> None:
    assert ci("SKIPPED [5] tests/test_x.py: 5 skipped", PURE, IN_TURN) == (
        0,
        "passed: check, sanitize, test (63 tests skipped)",
    )


def test_none_skipped_is_said_too(ci: Ci) -> None:
    assert ci("=== 7 passed in 0.20s ===") == (0, "passed: check, sanitize, test (0 tests skipped)")


@pytest.mark.parametrize("what", ["check", "sanitize"])
def test_what_failed_is_named(ci: Ci, what: str) -> None:
    assert ci(IN_TURN, fails=what) == (1, f"FAILED: {what} (60 tests skipped)")


def test_tests_that_failed_are_no_pass(ci: Ci) -> None:
    assert ci(PURE, fails="test") == (1, "FAILED: test (3 tests skipped)")
