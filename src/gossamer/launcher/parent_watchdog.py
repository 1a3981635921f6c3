"""Parent watchdog: a process that outlives a killed launcher, kills its workers, and removes its directory.

This file is also the program: `python -I -S parent_watchdog.py` reads +PID and -PID, one per line. At the end of its
input it kills the remaining process groups. Then it removes the directory of the last line =DIRECTORY (in JSON; empty
for none), which contains the run's secret; it keeps event logs of workers without a record. It sends SIGKILL, because a
process that is stopped or stuck in native code handles no other signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

KEPT = "events-*.jsonl"
REMOVING_SECONDS = 5.0  # for killed processes to end; then they write no more files


class OrphanReaper:
    """Context manager: kills the added process groups that were not removed when this process ends, for any reason.
    The directory is removed at the end of the block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sending = threading.Lock()  # a worker's end is reported at any time, also after the block

    def __enter__(self) -> OrphanReaper:
        # A session of its own: signals of the terminal to the launcher must not reach it
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._remove(str(self._directory.absolute()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove("")
        assert self._process.stdin is not None
        with self._sending:
            self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._send(f"-{group}\n")

    def _remove(self, directory: str) -> None:
        self._send(f"={json.dumps(directory)}\n")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(BrokenPipeError):  # it was killed; the run does not depend on it
            if not self._process.stdin.closed:
                self._process.stdin.write(line.encode())


def left(lines: Iterable[str]) -> tuple[set[int], str]:
    """The groups that were added and not removed, and the directory to remove, empty for none."""
    groups: set[int] = set()
    directory = ""
    for line in lines:
        kind, text = line[0], line[1:]
        if kind == "=":
            directory = json.loads(text)
        else:
            (groups.add if kind == "+" else groups.discard)(int(text))
    return groups, directory


def main() -> None:
    groups, directory = left(sys.stdin)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(group)
    deadline = time.monotonic() + REMOVING_SECONDS
    while directory and not remove(Path(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)


def kill(group: int) -> None:
    """Kill a process group. On Windows, which has none, only its leader."""
    if sys.platform == "win32":
        os.kill(group, signal.SIGTERM)
    else:
        os.killpg(group, signal.SIGKILL)


def remove(directory: Path) -> bool:
    """Remove all files except non-empty event logs. Return False if any other file was found."""
    left = [path for path in directory.glob("*") if not (path.match(KEPT) and path.stat().st_size)]
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):  # event logs are left in it
        directory.rmdir()
    return not left


if __name__ == "__main__":
    main()
