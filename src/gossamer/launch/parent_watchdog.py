"""Parent watchdog: a process that outlives a killed launcher and kills the process groups it had started.

This file is also the program: `python -I -S parent_watchdog.py` reads +PID and -PID, a line each, and kills the process
groups that are left at the end of its input. SIGKILL, because a process that is stopped or stuck in native code
handles no other signal; a process of its own, because the killed launcher cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType


class OrphanReaper:
    """Context manager: groups that were added and not removed do not outlive this process, however it ends."""

    def __enter__(self) -> OrphanReaper:
        # A session of its own: what a terminal sends to the launcher is not meant for it
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed; the run does not depend on it
            if self._process.stdin is not None:
                self._process.stdin.write(line.encode())


def left(lines: Iterable[str]) -> set[int]:
    """The groups that were added and not removed."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    return groups


def main() -> None:
    for group in left(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
