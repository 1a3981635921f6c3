"""Clock identity: processes that give the same text here read the same monotonic clock, whose moments compare."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHIFTED = Path("/proc/self/timens_offsets")  # a time namespace moves the clock of its processes


def clock_identity() -> str:
    """Of time.perf_counter(). On Linux all processes since one boot share it, in containers, too; elsewhere none is
    known to."""
    if sys.platform == "linux":
        with suppress(OSError):
            shifts = _SHIFTED.read_text().split() if _SHIFTED.exists() else []
            moved = [word for word in shifts if word.lstrip("-").isdigit() and int(word)]
            return "-".join(["boot", _BOOT.read_text().strip(), *(shifts if moved else ())])
    return f"process-{socket.gethostname()}-{os.getpid()}"
