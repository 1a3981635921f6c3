"""The warning that `import gossamer` gives if the installation has no compiled kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gossamer.base import compiled


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process without workers, in an installation without kernels."""
    for name in (*compiled.OF_WORKERS, "GOSSAMER_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "libgossamer-kernels.so")


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled.warn_if_missing()
    return [str(each.message) for each in caught]


def test_missing_kernels_warn_with_consequence_and_remedy() -> None:
    (message,) = warned()
    assert compiled.SLOWER in message
    assert "C++ compiler" in message
    assert "wheel" in message


def test_installed_kernels_do_not_warn() -> None:
    compiled.LIBRARY.touch()
    assert warned() == []


@pytest.mark.parametrize("name", [*compiled.OF_WORKERS, "GOSSAMER_KERNELS"])
def test_workers_and_processes_that_chose_their_kernels_do_not_warn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "reference")
    assert warned() == []


def test_a_worker_of_gossamer_run_leaves_the_report_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled.reported_by_launcher()
    monkeypatch.setenv("GOSSAMER_LAUNCHER_PID", "7")
    assert compiled.reported_by_launcher()
    compiled.LIBRARY.touch()  # kernels of other sources: the launcher does not load them
    assert not compiled.reported_by_launcher()


def test_import_warns_once_and_does_not_import_torch(tmp_path: Path) -> None:
    code = f"""
import sys, warnings
from pathlib import Path
import gossamer.version  # the package's own imports
from gossamer.base import compiled
compiled.LIBRARY = Path({str(tmp_path / "missing.so")!r})
del sys.modules["gossamer"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import gossamer
    import gossamer
assert len(caught) == 1, caught
assert caught[0].filename == "<string>", caught[0].filename
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
