"""Host information: processor, cores and versions of the machine that ran a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str | int]:
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name if the system reports one, else its architecture."""
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
