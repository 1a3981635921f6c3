"""Process logs: write what servers print, and say what any log of processes that start one by one can do."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from gossamer.base.run_files import RunFiles
from gossamer.launch.logs.follow import OutputReader, RankLog


class ProcessLog(Protocol):
    """The log of one worker or server over all its restarts. Lines are read when `look` is called."""

    def begin(self, attempt: int) -> None: ...
    def look(self) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class ServerLog:
    """One server's lines go to `say`, after its name, and to its log file."""

    def __init__(
        self, server: int, number: int, files: RunFiles, logs: Path, command: Iterable[str], say: Callable[[str], None]
    ) -> None:
        self._server, self._say = server, say
        self._lock = threading.RLock()  # one thread looks, the supervisor's begins
        self._log = RankLog(server_log_path(logs, server), shlex.join(command))
        self._output = OutputReader(files, number)

    def begin(self, attempt: int) -> None:
        with self._lock:
            self._drain()
            self._output.begin(attempt)
            self._log.add([f"# server {self._server} starts" + (f", attempt {attempt + 1}" if attempt else "")])

    def look(self) -> None:
        with self._lock:
            self._hand_on(self._output.lines())

    def note(self, text: str) -> None:
        with self._lock:
            self._drain()
            self._log.add(text.splitlines())

    def close(self) -> None:
        with self._lock:
            self._drain()
            self._log.close()

    def _drain(self) -> None:
        self._hand_on(self._output.rest())

    def _hand_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log.add([line])
            self._say(f"server {self._server}: {line}")


def server_log_path(logs: Path, server: int) -> Path:
    return Path(os.path.normpath(logs)) / f"server-{server}.log"
