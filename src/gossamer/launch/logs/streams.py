"""Process logs: follows the output of workers and servers that start one by one, each for itself."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gossamer.launch.job import Job
from gossamer.launch.logs.follow import Follower, LineReader, RankLog, Show
from gossamer.launch.logs.run_files import RunFiles


class ProcessLog(Protocol):
    """The log of one worker or server over all its restarts. Lines are read when `look` is called."""

    def begin(self, attempt: int) -> None: ...
    def look(self) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class WorkerLog:
    """One worker's lines go to `show` and to its log file; each of its attempts has a header there."""

    def __init__(self, job: Job, rank: int, files: RunFiles, show: Show) -> None:
        # To the follower each worker is alone on a machine of its own, since attempts are counted by worker
        alone = replace(job, workers=1, nodes=job.workers, node_rank=rank, rendezvous="here")
        self._rank = rank
        self._follower = Follower(alone, files, show)

    def begin(self, attempt: int) -> None:
        self._follower.begin(attempt)

    def look(self) -> None:
        self._follower.look()

    def note(self, text: str) -> None:
        """Add a text to the log that the worker did not print, after all that it did."""
        self._follower.drain()
        self._follower.note(self._rank, text)

    def close(self) -> None:
        self._follower.drain()
        self._follower.close()


class ServerLog:
    """One server's lines go to `say`, after its name, and to its log file."""

    def __init__(
        self, server: int, number: int, files: RunFiles, logs: Path, command: Iterable[str], say: Callable[[str], None]
    ) -> None:
        self._server = server
        self._number = number
        self._files = files
        self._say = say
        self._lock = threading.RLock()  # one thread looks, the supervisor's begins
        self._log = RankLog(server_log_path(logs, server), shlex.join(command))
        self._readers: tuple[LineReader, ...] = ()

    def begin(self, attempt: int) -> None:
        with self._lock:
            self._drain()
            paths = (self._files.boot(self._number, attempt), self._files.output(self._number, attempt))
            self._readers = tuple(LineReader(path) for path in paths)
            self._log.add([f"# server {self._server} starts" + (f", attempt {attempt + 1}" if attempt else "")])

    def look(self) -> None:
        with self._lock:
            for reader in self._readers:
                self._hand_on(reader.lines())

    def note(self, text: str) -> None:
        with self._lock:
            self._drain()
            self._log.add(text.splitlines())

    def close(self) -> None:
        with self._lock:
            self._drain()
            self._log.close()

    def _drain(self) -> None:
        for reader in self._readers:
            self._hand_on(reader.rest())

    def _hand_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._log.add([line])
            self._say(f"server {self._server}: {line}")


def server_log_path(logs: Path, server: int) -> Path:
    return Path(os.path.normpath(logs)) / f"server-{server}.log"
