"""Process logs: reads the output of a run's processes by complete lines, shows it, and keeps one log file each."""

from __future__ import annotations

import errno
import io
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from gossamer.base import system
from gossamer.base.run_files import RunFiles, read_json
from gossamer.launcher import stack_dumps
from gossamer.launcher.job import Job

BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 1 << 20  # of an unfinished line; a longer one is shown in parts
MOST_WAITING_BYTES = 2**24
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE}
LOST = "[gossamer: {count} bytes are missing here: the disk was full]\n"

Show = Callable[[int, str], None]  # rank and line; a line that ends in a carriage return will be replaced


class PatientFile(io.RawIOBase):
    """Writes to an open file, which the caller closes. Errors of the disk, such as a full one, do not raise.

    Bytes that the disk refuses are kept in memory, up to 16 MB, for the next write. Further bytes are lost; a line with
    their number is written instead.
    """

    def __init__(self, file: io.FileIO, name: str = "") -> None:
        super().__init__()
        self._file, self.name = file, name
        self._waiting = b""
        self._lost = 0  # bytes after the waiting ones
        self._writes = False
        self._lock = threading.RLock()  # a signal's handler may print, too

    def write(self, data: Any, /) -> int:
        with self._lock:
            given = bytes(data)
            self._flush()
            if self._waiting and len(self._waiting) + len(given) > MOST_WAITING_BYTES:
                self._lost += len(given)
            else:
                self._waiting += self._lost_notice() + given
                self._flush()
            return len(given)

    def fileno(self) -> int:
        return self._file.fileno()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._file.isatty()

    def _lost_notice(self) -> bytes:
        lost, self._lost = self._lost, 0
        return LOST.format(count=lost).encode() if lost else b""

    def _flush(self) -> None:
        if self._writes:  # a signal's handler interrupted the loop below, which also writes its bytes
            return
        self._writes = True
        try:
            while self._waiting:
                written = os.write(self._file.fileno(), self._waiting)
                self._waiting = self._waiting[written:]
        except OSError as problem:
            if problem.errno not in DISK:
                raise
        finally:
            self._writes = False


class LineReader:
    """Reads the complete lines appended to a file since the last call. The file need not exist yet.

    Lines are split as bytes, so a character that arrives in two reads stays whole. Progress bars rewrite a line with
    carriage returns: only its last version is a line. `rewritten` is the latest version of an unfinished one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self._is_rewritten = False  # whether the unfinished line has carriage returns

    def lines(self) -> Iterator[str]:
        for block in self._blocks():
            *whole, partial = (self._partial + block).split(b"\n")
            self._partial = _last_version(partial)
            self._is_rewritten = len(self._partial) < len(partial) or (self._is_rewritten and not whole)
            yield from map(_text, whole)
            if len(self._partial) > MOST_LINE_BYTES:
                yield _text(self._partial)
                self._partial, self._is_rewritten = b"", False

    @property
    def rewritten(self) -> str | None:
        """Latest version of an unfinished, rewritten line; None without one. A character that is cut shows as
        U+FFFD."""
        return _text(self._partial) if self._is_rewritten else None

    def rest(self) -> Iterator[str]:
        """The remaining lines, and the text after the last line end."""
        yield from self.lines()
        if self._partial:
            yield _text(self._partial)
            self._partial, self._is_rewritten = b"", False

    def _blocks(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                self._offset += len(block)
                yield block


def _last_version(line: bytes) -> bytes:
    """The line as a terminal shows it. A carriage return at the very end may be the first half of a line end."""
    return line[line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1 :]


def _text(line: bytes) -> str:
    return _last_version(line.removesuffix(b"\r")).decode(errors="replace")


class RankLog:
    """One rank's log file: a header, then every line with the time it was read."""

    def __init__(self, path: Path, command: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._opened = system.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file = PatientFile(self._opened)
        self._command = command

    def header(self, rank: int, attempt: int, started: Mapping[str, Any]) -> None:
        """Write the header. started: the worker's start report; empty without one."""
        restarted = f" attempt {attempt + 1}" if attempt else ""
        host, pid = started.get("host", socket.gethostname()), started.get("pid", "unknown")
        moment = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(started.get("moment")))
        self._write(f"# rank {rank}{restarted} host {host} pid {pid} started {moment}\n# command {self._command}\n")

    def add(self, lines: Iterable[str]) -> None:
        moment = time.time()
        stamp = time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
        self._write("".join(f"{stamp} {line}\n" for line in lines))

    def close(self) -> None:
        self._opened.close()

    def _write(self, text: str) -> None:
        self._file.write(text.encode("utf-8", "replace"))


class OutputReader:
    """Lines of a process's output files, from its latest attempt."""

    def __init__(self, files: RunFiles, number: int) -> None:
        self._files, self._number = files, number
        self._readers: tuple[LineReader, ...] = ()

    def begin(self, attempt: int) -> None:
        paths = (self._files.boot(self._number, attempt), self._files.output(self._number, attempt))
        self._readers = tuple(LineReader(path) for path in paths)

    def lines(self) -> Iterator[str]:
        return chain.from_iterable(reader.lines() for reader in self._readers)

    def rest(self) -> Iterator[str]:
        return chain.from_iterable(reader.rest() for reader in self._readers)

    @property
    def rewritten(self) -> str | None:
        return next((text for reader in self._readers if (text := reader.rewritten) is not None), None)


class ProcessLog(Protocol):
    """Log of one worker or server over all its restarts. `look` reads new lines."""

    def begin(self, attempt: int) -> None: ...
    def look(self) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class WorkerLog:
    """Passes every line of one worker to `show(rank, line)` and to its log file, with a header for each attempt.

    Each version of an unfinished, rewritten line is only shown, with a carriage return at its end. Stacks that the
    launcher has requested are only logged: they are long, and a rank that validates alone is enough to cause them.
    """

    def __init__(self, job: Job, rank: int, files: RunFiles, show: Show) -> None:
        self._rank, self._files, self._show = rank, files, show
        self._lock = threading.RLock()  # `look` has its own thread; the launcher's begins and drains
        self._log = RankLog(log_path(job.logs, rank), job.command)
        self._output = OutputReader(files, rank)
        self._attempt, self._headed = -1, False
        self._version: str | None = None  # last shown version of an unfinished line
        self._in_stacks = False

    def begin(self, attempt: int) -> None:
        """Pass on the rest of the previous attempt's files, which are complete, and follow the new ones."""
        with self._lock:
            self.drain()
            self._attempt, self._headed, self._in_stacks = attempt, False, False
            self._output.begin(attempt)

    def look(self) -> None:
        with self._lock:
            self._hand_on(self._output.lines())
            if (version := self._output.rewritten) is not None and version != self._version:
                self._version = version
                self._show(self._rank, f"{version}\r")

    def drain(self) -> None:
        with self._lock:
            self._hand_on(self._output.rest())

    def note(self, text: str) -> None:
        """Add a text of the launcher to the log, after all output of the worker."""
        with self._lock:
            self.drain()
            self._head()
            self._log.add(text.splitlines())

    def close(self) -> None:
        with self._lock:
            self.drain()
            self._head()
            self._log.close()

    def _hand_on(self, lines: Iterator[str]) -> None:
        for line in lines:
            self._head()
            self._log.add([line])
            if line.endswith(stack_dumps.HEAD.format(rank=self._rank)):
                self._in_stacks = True
            if not self._in_stacks:
                self._show(self._rank, line)
            elif line == stack_dumps.END.format(rank=self._rank):
                self._in_stacks = False

    def _head(self) -> None:
        """Write the header before the first line: by then the worker has reported its pid."""
        if not self._headed:
            self._headed = True
            started = read_json(self._files.started(self._rank, self._attempt)) or {}
            self._log.header(self._rank, self._attempt, started)


def log_path(logs: Path, rank: int) -> Path:
    return Path(os.path.normpath(logs)) / f"rank-{rank}.log"


class ServerLog:
    """Passes every line of one server to `print_text`, with its name in front, and to its log file."""

    def __init__(
        self,
        server: int,
        number: int,
        files: RunFiles,
        logs: Path,
        command: Iterable[str],
        print_text: Callable[[str], None],
    ) -> None:
        self._server, self._print = server, print_text
        self._lock = threading.RLock()  # `look` has its own thread; the supervisor's begins
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
            self._print(f"server {self._server}: {line}")


def server_log_path(logs: Path, server: int) -> Path:
    return Path(os.path.normpath(logs)) / f"server-{server}.log"
