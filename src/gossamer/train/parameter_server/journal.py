"""Journal of a server: a snapshot of its shard and a write-ahead log, from which a killed server resumes.

    DIRECTORY/server-0/step-00000003/...     the state, in the format of checkpoints
    DIRECTORY/server-0/log-00000003          every entry since then, in order; the last may be incomplete

An entry is written before the shard changes and before any worker gets an answer: answered contributions are never
lost, and unanswered ones are sent again. This holds for a killed process; after a power failure, writes that were still
in the operating system's cache are lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from gossamer.base import system
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train import checkpoint
from gossamer.train.parameter_server.from_recipe import make_shard
from gossamer.train.parameter_server.journal_entry import Entry, encode_entry, read_entries
from gossamer.train.parameter_server.shard import ServerShard

STATES_PER_LOG = 4  # maximum size of a log in multiples of the state; then a new state is written
SHORTEST_LOG = 1 << 20
LONGEST_REPLAY_SECONDS = 1.0  # maximum work to replay, for which all workers wait; then a new state is written
STATES_PER_REPLAY = 10.0  # unless writing states would then take more than a tenth of the time


class Log:
    """An append-only file. A failed write raises OSError and leaves an incomplete entry."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.nbytes = keep_bytes
        self._file = system.open_file(path, os.O_RDWR | os.O_CREAT)
        self._file.truncate(keep_bytes)
        self._file.seek(0, os.SEEK_END)

    def append(self, buffers: Iterable[bytes | memoryview]) -> None:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                count = os.write(self._file.fileno(), rest)
                rest = rest[count:]
                self.nbytes += count

    def sync(self) -> None:
        """Make appended entries durable against power failures."""
        system.sync_file(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class FileJournal:
    """The journal of one shard in `folder`. number: of the state that the log continues."""

    def __init__(self, folder: Path, shard: ServerShard, number: int, log: Log | None) -> None:
        self._folder, self._shard, self._state_number, self._open_log = folder, shard, number, log
        self._missed_bytes, self._failed = 0, False
        self._most_log_bytes = max(STATES_PER_LOG * _state_bytes(shard), SHORTEST_LOG)
        self._began, self._most_replay_seconds = time.thread_time(), LONGEST_REPLAY_SECONDS

    def write(self, entry: Entry) -> None:
        """Append to the log; write a new state first if the log is long.

        On failure the server continues without a journal, so that workers need not wait. It prints one notice, renames
        the folder so that no server resumes from an outdated state, and tries again after the size of a full log.
        """
        buffers = encode_entry(entry)
        if self._open_log is None:
            self._missed_bytes += sum(len(buffer) for buffer in buffers)
        try:
            if self._is_long():
                self.save()
            if self._open_log is not None:
                self._open_log.append(buffers)
        except (OSError, CheckpointError) as error:
            self.give_up(error)

    def _is_long(self) -> bool:
        if self._open_log is None:
            return self._missed_bytes > self._most_log_bytes
        return (
            self._open_log.nbytes > self._most_log_bytes or time.thread_time() - self._began > self._most_replay_seconds
        )

    def save(self) -> None:
        """Write the shard's state, and begin a new log. Raises CheckpointError or OSError."""
        number, began = self._state_number + 1, time.thread_time()
        self._folder.mkdir(parents=True, exist_ok=True)
        tree = {"description": self._shard.spec.to_json(), "shard": self._shard.state_dict()}
        digest = checkpoint.stage(self._folder, number, 0, tree)
        checkpoint.complete(self._folder, number, 0, [digest], {}, keep=1)
        log = Log(_open_log(self._folder, number))
        if self._open_log is not None:
            self._open_log.close()
        elif self._failed:
            notice(f"The journal in {self._folder} is written again; a restarted server resumes from it.")
        self._state_number, self._open_log, self._missed_bytes, self._failed = number, log, 0, False
        self._began = time.thread_time()
        self._most_replay_seconds = max(LONGEST_REPLAY_SECONDS, STATES_PER_REPLAY * (self._began - began))
        for path in self._folder.glob("log-*"):
            if path != _open_log(self._folder, number):
                path.unlink()

    def start_over(self) -> None:
        """Write the shard's state after it was replaced. Failures are handled as in `write`."""
        try:
            self.save()
        except (OSError, CheckpointError) as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Continue without a journal."""
        if not self._failed:
            notice(
                f"The journal in {self._folder} cannot be written ({error}). The server continues without it, and "
                "would lose its state on a restart. Free some space: it tries again later."
            )
        self.close()
        self._missed_bytes, self._failed = 0, True
        put_away = self._folder.with_name(self._folder.name + ".stopped")
        if self._folder.exists():
            shutil.rmtree(put_away, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.rename(put_away)

    def close(self) -> None:
        if self._open_log is not None:
            self._open_log.close()
            self._open_log = None


def keep(directory: str | os.PathLike[str], shard: ServerShard) -> FileJournal:
    """Start a journal for a new shard."""
    folder = _folder(directory, shard.spec.number)
    shard.journal = journal = FileJournal(folder, shard, max(checkpoint.complete_steps(folder, 0), default=0), None)
    try:
        journal.save()
    except (OSError, CheckpointError) as error:
        journal.give_up(error)
    return journal


def restore(directory: str | os.PathLike[str], number: int) -> ServerShard | None:
    """Restore server `number` from its journal; None without a journal.

    Raises CheckpointError for a damaged state.
    """
    folder = _folder(directory, number)
    states = checkpoint.complete_steps(folder, 0)
    if not states:
        return None
    tree, _ = checkpoint.read(folder, states[-1], 0)
    shard = make_shard(tree["description"], tuple(tree["shard"]["parameters"]))
    shard.load_state_dict(tree["shard"])
    end = _replay(shard, _open_log(folder, states[-1]))
    shard.journal = FileJournal(folder, shard, states[-1], Log(_open_log(folder, states[-1]), end))
    return shard


def _replay(shard: ServerShard, path: Path) -> int:
    """Apply the entries of a log. Returns the offset of the end of the last complete one."""
    if not path.is_file():  # killed before the log was created
        return 0
    end = 0
    with path.open("rb") as file:
        for entry, end in read_entries(file, path.stat().st_size):  # noqa: B007
            shard.replay(entry)
    return end


def _folder(directory: str | os.PathLike[str], number: int) -> Path:
    return Path(directory) / f"server-{number}"


def _open_log(folder: Path, number: int) -> Path:
    return folder / f"log-{number:08d}"


def _state_bytes(shard: ServerShard) -> int:
    return sum(block.flat.nbytes for block in shard.blocks)
