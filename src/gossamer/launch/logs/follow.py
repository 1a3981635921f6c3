"""Log following: reads growing output files by complete lines, and writes one log file per rank."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gossamer.launch.job import Job
from gossamer.launch.logs.run_files import RunFiles, read_json

BLOCK_BYTES = 1 << 20

Show = Callable[[int, str], None]


class LineReader:
    """Reader of the complete lines appended to a file since the last call; the file need not exist yet.

    Splitting is done on bytes, so a character whose bytes arrive in two reads stays whole. Of a line that is
    rewritten with carriage returns, as progress bars do, the last version counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def lines(self) -> Iterator[str]:
        for block in self._blocks():
            *whole, self._partial = (self._partial + block).split(b"\n")
            self._partial = _last_version(self._partial)
            yield from map(_text, whole)

    def rest(self) -> Iterator[str]:
        """The last lines, and what follows the last line's end."""
        yield from self.lines()
        if self._partial:
            yield _text(self._partial)
            self._partial = b""

    def _blocks(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                yield block


def _last_version(line: bytes) -> bytes:
    """The line as a terminal would show it; a carriage return at the very end may still be half of a line's end."""
    return line[line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1 :]


def _text(line: bytes) -> str:
    return _last_version(line.removesuffix(b"\r")).decode(errors="replace")


class RankLog:
    """One rank's log file: a header, then every line with the time it was read."""

    def __init__(self, path: Path, command: str) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._command = command

    def header(self, rank: int, attempt: int, started: Mapping[str, Any]) -> None:
        """started: the worker's start report, empty if it never wrote one."""
        restarted = f" attempt {attempt + 1}" if attempt else ""
        host, pid = started.get("host", socket.gethostname()), started.get("pid", "unknown")
        moment = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(started.get("moment")))
        self._file.write(
            f"# rank {rank}{restarted} host {host} pid {pid} started {moment}\n# command {self._command}\n"
        )

    def add(self, lines: Iterable[str]) -> None:
        moment = time.time()
        stamp = time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
        self._file.writelines(f"{stamp} {line}\n" for line in lines)

    def close(self) -> None:
        self._file.close()


class Follower:
    """Hands every line of every local worker to `show(rank, line)` and to the rank's log file."""

    def __init__(self, job: Job, files: RunFiles, show: Show) -> None:
        self._job = job
        self._files = files
        self._show = show
        self._lock = threading.RLock()  # one thread looks, the engine's begins and drains
        job.logs.mkdir(parents=True, exist_ok=True)
        self._logs = {rank: RankLog(log_path(job.logs, rank), job.command) for rank in job.local_ranks}
        self._readers: dict[int, tuple[LineReader, LineReader]] = {}
        self._attempt = -1
        self._headed: set[int] = set()

    def begin(self, attempt: int) -> None:
        """Hand on the rest of the previous attempt's files, which are complete now, and follow the new ones."""
        with self._lock:
            self.drain()
            self._attempt = attempt
            self._headed.clear()
            self._readers = {
                rank: (
                    LineReader(self._files.boot(rank, attempt)),
                    LineReader(self._files.output(rank, attempt)),
                )
                for rank in self._job.local_ranks
            }

    def look(self) -> None:
        with self._lock:
            for rank, readers in tuple(self._readers.items()):
                for reader in readers:
                    self._hand_on(rank, reader.lines())

    def drain(self) -> None:
        with self._lock:
            for rank, readers in self._readers.items():
                for reader in readers:
                    self._hand_on(rank, reader.rest())

    def note(self, rank: int, text: str) -> None:
        """Add a text to a rank's log that its worker did not print."""
        with self._lock:
            if rank in self._logs:
                self._head(rank)
                self._logs[rank].add(text.splitlines())

    def close(self) -> None:
        for rank, log in self._logs.items():
            self._head(rank)
            log.close()

    def _hand_on(self, rank: int, lines: Iterator[str]) -> None:
        for line in lines:
            self._head(rank)
            self._logs[rank].add([line])
            self._show(rank, line)

    def _head(self, rank: int) -> None:
        """The header waits for the first line, because only then the worker has said its pid."""
        if rank not in self._headed:
            self._headed.add(rank)
            started = read_json(self._files.started(rank, self._attempt)) or {}
            self._logs[rank].header(rank, self._attempt, started)


def log_path(logs: Path, rank: int) -> Path:
    return Path(os.path.normpath(logs)) / f"rank-{rank}.log"
