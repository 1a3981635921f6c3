"""What CI runs: its last lines say what passed, what failed, and how many tests were skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT

PURE = "=== 7400 passed, 3 skipped, 1 xfailed in 200.11s (0:03:20) ==="
IN_TURN = "====== 110 passed, 60 skipped in 343.00s (0:05:43) ======"
FRAMEWORKS = "=== 197 passed, 2 skipped in 60.11s (0:01:00) ==="
NO_NETWORK = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/jax/"
ABSENT = (
    "SKIPPED [5] tests/support/jax_training.py:17: could not import 'jax': No module named 'jax'",
    "SKIPPED [21] tests/frameworks/keras/test_keras.py:146: keras is not installed",
    "SKIPPED [2] tests/comm/test_links.py:9: needs root",
)
# The check waits until the sanitizers begin, and they until it does: one after the other, neither would end.
BESIDE = "case $1 in sanitize) echo >began;; check) read _ <began;; esac\n"
Ci = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    """Runs a copy of .ci/run with a `make` that prints the given lines: (exit code, line of frameworks, last line)."""

    def run(*tested: str, fails: str = "nothing", installing: str = "") -> tuple[int, str, str]:
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
        for name in ("mpirun", "ip", "nft", "chromium", "munged", "slurmctld", "slurmd", "sbatch", "make"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        os.mkfifo(tmp_path / "began")
        printed = {"test": "\n".join([*tested, "exits"]), "test-frameworks": FRAMEWORKS, "frameworks": installing}
        prints = "".join(f"{target}) cat <<'END'\n{text}\nEND\n;;\n" for target, text in printed.items())
        (tmp_path / "make").write_text(f"#!/bin/sh\n{BESIDE}case $1 in\n{prints}esac\n[ $1 != {fails} ]\n")
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=30,
        )
        frameworks, last = done.stdout.splitlines()[-2:]
        return done.returncode, re.sub(r"\d+ s\)", "60 s)", frameworks), last

    return run


PASSED = "test-frameworks: passed (2 tests skipped, 60 s)"


def test_tests_that_were_skipped_are_counted_in_both_passes(ci: Ci) -> None:
    assert ci("SKIPPED [5] tests/test_x.py: 5 skipped", PURE, IN_TURN) == (
        0,
        PASSED,
        "passed: check, check-systems, sanitize, docs, test, test-notebooks (63 tests skipped)",
    )


def test_none_skipped_is_reported_too(ci: Ci) -> None:
    assert ci("=== 7 passed in 0.20s ===") == (
        0,
        PASSED,
        "passed: check, check-systems, sanitize, docs, test, test-notebooks (0 tests skipped)",
    )


@pytest.mark.parametrize("what", ["check", "sanitize"])
def test_what_failed_is_named(ci: Ci, what: str) -> None:
    assert ci(IN_TURN, fails=what) == (1, PASSED, f"FAILED: {what} (60 tests skipped)")


def test_tests_that_failed_are_no_pass(ci: Ci) -> None:
    assert ci(PURE, fails="test") == (1, PASSED, "FAILED: test (3 tests skipped)")


def test_failures_of_frameworks_fail_ci(ci: Ci) -> None:
    assert ci(PURE, fails="test-frameworks") == (
        1,
        "test-frameworks: FAILED (2 tests skipped, 60 s)",
        "FAILED: test-frameworks (3 tests skipped)",
    )


def test_frameworks_are_skipped_with_a_count_without_a_network(ci: Ci) -> None:
    code, frameworks, last = ci(*ABSENT, PURE, fails="frameworks", installing=NO_NETWORK)
    assert (code, last) == (0, "passed: check, check-systems, sanitize, docs, test, test-notebooks (3 tests skipped)")
    assert frameworks.startswith("test-frameworks: skipped (26 tests;")
    assert "could not be downloaded" in frameworks


def test_frameworks_that_cannot_be_installed_for_another_reason_fail_ci(ci: Ci) -> None:
    code, frameworks, last = ci(PURE, fails="frameworks", installing="ERROR: ResolutionImpossible")
    assert (code, last) == (1, "FAILED: frameworks (3 tests skipped)")
    assert frameworks.startswith("test-frameworks: FAILED")
