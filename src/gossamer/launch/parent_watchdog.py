"""Parent watchdog: kills what a killed launcher had started, and removes its directory, in a process that outlives it.

This file is also the program: `python -I -S parent_watchdog.py` reads +PID and -PID, a line each, and kills the process
groups that are left at the end of its input; then it removes the directory of the last line =DIRECTORY (in JSON; empty
for none), which holds the run's secret, all but the workers' event logs, which no record was made of. SIGKILL, because
a process that is stopped or stuck in native code handles no other signal; a process of its own, because the killed
launcher cannot.
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
REMOVING_SECONDS = 5.0  # in which those that were killed are gone, and write nothing more


class OrphanReaper:
    """Context manager: groups that were added and not removed do not outlive this process, however it ends, and the
    directory outlives only the end of the block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._telling = threading.Lock()  # a worker's watcher tells of its end at any time, also after the block

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
        self._remove(str(self._directory.absolute()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove("")
        assert self._process.stdin is not None
        with self._telling:
            self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _remove(self, directory: str) -> None:
        self._tell(f"={json.dumps(directory)}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._telling, contextlib.suppress(BrokenPipeError):  # it was killed; the run does not depend on it
            if not self._process.stdin.closed:
                self._process.stdin.write(line.encode())


def left(lines: Iterable[str]) -> tuple[set[int], str]:
    """The groups that were added and not removed, and the directory to remove, empty for none."""
    groups: set[int] = set()
    directory = ""
    for line in lines:
        kind, said = line[0], line[1:]
        if kind == "=":
            directory = json.loads(said)
        else:
            (groups.add if kind == "+" else groups.discard)(int(said))
    return groups, directory


def main() -> None:
    groups, directory = left(sys.stdin)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + REMOVING_SECONDS
    while directory and not remove(Path(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)


def remove(directory: Path) -> bool:
    """Remove all but event logs that hold something; False where there was something else."""
    left = [path for path in directory.glob("*") if not (path.match(KEPT) and path.stat().st_size)]
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):  # there are event logs in it
        directory.rmdir()
    return not left


if __name__ == "__main__":
    main()
