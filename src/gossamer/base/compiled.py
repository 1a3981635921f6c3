"""Whether the compiled kernels are installed. Without torch, because `import gossamer` asks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

LIBRARY = Path(__file__).with_name("kernels") / "libgossamer-kernels.so"
SLOWER = "encoding takes 10 to 130 times as long, with the same results"
# Launchers set one of these in workers, where `attach` reports missing kernels once for each machine.
OF_WORKERS = ("GOSSAMER_LAUNCHER_PID", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def remedy() -> str:
    """How to get compiled kernels on this system."""
    from gossamer.base import system  # imported late: its imports take a third of the time of `import gossamer`

    if system.IS_WINDOWS:
        return "Native Windows has no compiled loops: use WSL2"
    return (
        "Install a wheel with kernels (Linux on x86-64 or aarch64), or install a C++ compiler (g++ or clang++) and "
        "Gossamer again: pip install -e . in its sources"
    )


def warn_if_missing() -> None:
    """Warn the process that imports gossamer if its installation has no compiled kernels and needs them."""
    if LIBRARY.exists() or os.environ.get("GOSSAMER_KERNELS") or any(name in os.environ for name in OF_WORKERS):
        return
    warnings.warn(
        f"this installation of Gossamer has no compiled kernels ({LIBRARY.name}): {SLOWER}. {remedy()}.", stacklevel=3
    )


def reported_by_launcher() -> bool:
    """Whether `gossamer run`, which started this worker, has warned of missing kernels."""
    return "GOSSAMER_LAUNCHER_PID" in os.environ and not LIBRARY.exists()
