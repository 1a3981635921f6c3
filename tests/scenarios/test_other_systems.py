"""macOS and Windows: the library runs without the calls of Linux, as far as a process on Linux can show it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import nightly
from support.other_system_checks import CHECKS, STEPS
from support.paths import ROOT, TESTS

SYSTEMS = ["darwin", "win32"]
SOURCES = ROOT / "src" / "gossamer"
# A parent watchdog runs without the package; the other modules are features of Linux
KNOW_THE_SYSTEM = {
    "base/system.py",
    "comm/environment/network_interfaces.py",
    "comm/mesh/shared_memory.py",
    "launcher/parent_watchdog.py",
}
ASKS = re.compile(r"\bsys\.platform\b|\bos\.name\b|\bos\.open\(|^\s*import (fcntl|resource|pwd|termios)", re.M)
PURE = ["tests/comm/membership", "tests/comm/rpc", "tests/train/checkpoint", "tests/train/sampler"]
# Windows syncs no folders, so it has no such promise, and it cannot fork
NOT_ON_WINDOWS = [
    "tests/train/checkpoint/test_fsync.py",
    "tests/comm/rpc/test_endpoint.py::test_a_forked_child_reports_nothing_and_holds_nothing",
]
# Text without an encoding is read differently on Windows: an error in the package; tests read and write ASCII
ENCODINGS = "filterwarnings=error\nignore::EncodingWarning\nerror::EncodingWarning:gossamer"


def environment(system: str) -> dict[str, str]:
    paths = [TESTS / "other_systems", TESTS / "eager", TESTS, ROOT / "src"]
    return {
        **os.environ,
        "GOSSAMER_TEST_SYSTEM": system,
        "GLOO_SOCKET_IFNAME": "lo",  # the network is this machine's
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONWARNDEFAULTENCODING": "1",
    }


def run(system: str, *words: str, folder: Path, seconds: float = 250) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env=environment(system),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


ALL = [check.__name__ for check in CHECKS]
# Imports of all modules lack more calls on Windows than on macOS: by day there, nightly on both
BY_DAY = [pytest.param("darwin", ALL[1:], id="darwin"), pytest.param("win32", ALL, id="win32")]


@pytest.mark.processes
@pytest.mark.parametrize(("system", "checks"), [*BY_DAY, *nightly(("darwin", ALL[:1]))])
def test_gossamer_imports_trains_and_explains_without_calls_of_linux(
    system: str, checks: list[str], tmp_path: Path
) -> None:
    printed = run(system, "-m", "support.other_system_checks", str(tmp_path), *checks, folder=tmp_path)
    assert [line.split(" ", 1)[0] for line in printed.splitlines() if line[:1].islower()] == checks
    if "imports_every_module" in checks:
        found = re.search(r"^imports_every_module (\d+) modules", printed, re.MULTILINE)
        assert found is not None
        assert int(found[1]) > 700


@pytest.mark.processes
@pytest.mark.parametrize("system", [*nightly("darwin"), "win32"])
def test_two_workers_train_and_save_by_the_launcher(system: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    words = ["-m", "gossamer", "run", "--workers", "2", "--logs", "logs", "steps.py", "saved"]
    printed = run(system, *words, folder=tmp_path)
    assert re.search(r"workers agree +yes", printed), printed
    assert (tmp_path / "logs" / "run.sqlite").exists()
    assert sorted(path.name for path in tmp_path.glob("saved/*/*.safetensors")) == [
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    failing = subprocess.run(
        [sys.executable, *words],
        env=environment(system),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert failing.returncode == 1
    assert "began at step 4" in failing.stdout + failing.stderr


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("system", SYSTEMS)
def test_pure_tests_pass_without_calls_of_linux(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_KERNELS", "reference")
    left_out = [f"--deselect={name}" for name in NOT_ON_WINDOWS if system == "win32"]
    marks = "not processes and not nightly and not namespaces and not measures"
    run(system, "-m", "pytest", "-q", "-o", ENCODINGS, "-m", marks, *left_out, *PURE, folder=ROOT, seconds=1100)


def test_one_module_asks_for_the_system() -> None:
    asking = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert asking == KNOW_THE_SYSTEM
