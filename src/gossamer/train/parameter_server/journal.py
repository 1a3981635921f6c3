"""Journal of a server: a snapshot of its shard and a write-ahead log since, from which a killed server goes on.

    DIRECTORY/server-0/step-00000003/...     the state, as checkpoints are kept
    DIRECTORY/server-0/log-00000003          every entry since, in order; the last may be torn

An entry is in the log before anything changes and before any worker is told: what was answered is never forgotten, and
what was not is resent. That holds for a killed process; a machine that loses power may lose what its operating system
had not yet written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train import checkpoint
from gossamer.train.parameter_server.from_recipe import make_shard
from gossamer.train.parameter_server.journal_entry import Entry, encode_entry, read_entries
from gossamer.train.parameter_server.shard import ServerShard

STATES_PER_LOG = 4  # a log of so many times the state's bytes is replaced by a new state
SHORTEST_LOG = 1 << 20
LONGEST_REPLAY_SECONDS = 1.0  # of work, which a restarted server repeats while all workers wait: then a new state, too
STATES_PER_REPLAY = 10.0  # unless writing states would then take more than a tenth of the time


class Log:
    """An append-only file. A write that fails raises OSError and leaves a torn entry behind."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.nbytes = keep_bytes
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.truncate(self._handle, keep_bytes)
        os.lseek(self._handle, 0, os.SEEK_END)

    def append(self, buffers: Iterable[bytes | memoryview]) -> None:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                count = os.write(self._handle, rest)
                rest = rest[count:]
                self.nbytes += count

    def sync(self) -> None:
        """What was appended outlives a machine that loses power."""
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


class FileJournal:
    """The journal of one shard in `folder`. number: of the state that the log continues."""

    def __init__(self, folder: Path, shard: ServerShard, number: int, log: Log | None) -> None:
        self._folder, self._shard, self._state_number, self._open_log = folder, shard, number, log
        self._missed_bytes, self._failed = 0, False
        self._most_log_bytes = max(STATES_PER_LOG * _state_bytes(shard), SHORTEST_LOG)
        self._began, self._most_replay_seconds = time.thread_time(), LONGEST_REPLAY_SECONDS

    def write(self, entry: Entry) -> None:
        """Append to the log, after a new state where it has grown long.

        Where that fails the server goes on without: workers that wait are worse. It gives notice once, puts the folder
        away, so that no server goes on from an outdated state, and tries again after as much as a log may hold.
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
            notice(f"The journal in {self._folder} is written again, so a restarted server goes on from there.")
        self._state_number, self._open_log, self._missed_bytes, self._failed = number, log, 0, False
        self._began = time.thread_time()
        self._most_replay_seconds = max(LONGEST_REPLAY_SECONDS, STATES_PER_REPLAY * (self._began - began))
        for path in self._folder.glob("log-*"):
            if path != _open_log(self._folder, number):
                path.unlink()

    def begin_anew(self) -> None:
        """The shard's state was replaced: write it. Where that fails, as in `write`."""
        try:
            self.save()
        except (OSError, CheckpointError) as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Go on without a journal."""
        if not self._failed:
            notice(
                f"The journal in {self._folder} cannot be written ({error}). The server goes on without it, and would "
                "remember nothing if it were restarted now. Free some space: it tries again after a while."
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
    """Begin to journal a new shard."""
    folder = _folder(directory, shard.spec.number)
    shard.journal = journal = FileJournal(folder, shard, max(checkpoint.complete_steps(folder, 0), default=0), None)
    try:
        journal.save()
    except (OSError, CheckpointError) as error:
        journal.give_up(error)
    return journal


def restore(directory: str | os.PathLike[str], number: int) -> ServerShard | None:
    """Server `number` as it was when it was stopped, with its journal; None where it never began.

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
    """Apply a log's entries again; returns where the last whole one ends."""
    if not path.is_file():  # killed between the state and its log
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
