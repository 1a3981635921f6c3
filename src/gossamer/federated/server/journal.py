"""Journal of rounds: a state for each version and a log of tasks since, from which a killed server goes on.

    DIRECTORY/rounds/step-00000003/...     the state after the third version that was written, as checkpoints are kept
    DIRECTORY/rounds/log-00000003          every task given since, and every one that ended, a line each
    DIRECTORY/rounds.stopped/              the last of these before the disk was full, until it can be written again

Tasks are in the log before devices hear of them, and a version is in its state before any receipt is given: a device
that was told what it did is never told otherwise. That holds for a killed process; a machine that loses power may
forget the last lines of the log, so that devices train again, and no version or round that devices know of.

A server that finds nothing here, or only what was put away, begins another past, which has a name of its own: devices
that hold versions of the one before begin anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.base.json_text import read_json
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.federated.server.roster import Assignment, RosterChange
from gossamer.train import checkpoint
from gossamer.train.checkpoint.fsync import sync_folder
from gossamer.train.parameter_server.journal import Log

if TYPE_CHECKING:
    from gossamer.federated.server.rounds import Rounds

PARSING = (ValueError, TypeError, KeyError, LookupError, AttributeError, RuntimeError)


class RoundsJournal(ABC):
    """Keeps what a killed server goes on from. One that cannot write gives notice once, and raises nothing unless the
    rounds must be journaled."""

    @abstractmethod
    def changed(self, change: RosterChange) -> None:
        """Assignments were made or ended; called before devices hear of them."""

    @abstractmethod
    def committed(self, rounds: Rounds) -> None:
        """A version was made; called before any receipt is given."""


class FileRoundsJournal(RoundsJournal):
    """The journal in `folder`."""

    def __init__(self, folder: Path, number: int, log: Log | None, rounds: Rounds) -> None:
        """number: of the state that the log continues; log: None where there is no state. Where the rounds must be
        journaled, a failed write raises CheckpointError."""
        self._folder, self._number, self._log, self._required = folder, number, log, rounds.must_be_journaled
        self._round = rounds.next_round  # that is on disk
        self._failed = False

    def changed(self, change: RosterChange) -> None:
        if self._log is None:
            return
        try:
            self._log.append([_line(change)])
            if change.next_round > self._round:  # no version tells of it, and a device that knows it never goes back
                self._log.sync()
                sync_folder(self._folder)
                self._round = change.next_round
        except OSError as error:
            self._give_up(error)

    def committed(self, rounds: Rounds) -> None:
        try:
            self._save(rounds)
        except (OSError, CheckpointError) as error:
            self._give_up(error)

    def _save(self, rounds: Rounds) -> None:
        number = self._number + 1
        digest = checkpoint.stage(self._folder, number, 0, rounds.state_dict())
        (self._folder / _log_name(number)).unlink(missing_ok=True)  # of a state that was never completed
        checkpoint.complete(self._folder, number, 0, [digest], {}, keep=1)
        self.close()
        self._number, self._log, self._round = number, Log(self._folder / _log_name(number)), rounds.next_round
        if self._failed:
            notice(f"The journal in {self._folder} is written again, so a restarted server goes on from there.")
        self._failed = False
        shutil.rmtree(_put_away(self._folder), ignore_errors=True)  # it is outdated now
        for path in self._folder.glob("log-*"):
            if path.name != _log_name(number):
                path.unlink(missing_ok=True)

    def _give_up(self, error: Exception) -> None:
        """Go on without. Put the folder away, so that no server goes on from what is outdated."""
        if self._required:
            self.close()
            raise CheckpointError(
                f"The journal in {self._folder} cannot be written ({error}). It counts what these rounds have told of "
                "devices, and a server that goes on without it could spend their privacy twice, so this one stops "
                "before anybody hears of what is not written. Free some space, and start it again with the same "
                "journal: it goes on from there."
            ) from error
        if not self._failed:
            notice(
                f"The journal in {self._folder} cannot be written ({error}). The server goes on without it, and a "
                "restarted one would go on from the last version that was. Free some space: it is tried again at every "
                "version."
            )
        self._failed = True
        self.close()
        with contextlib.suppress(OSError):
            if checkpoint.complete_steps(self._folder, 0):
                shutil.rmtree(_put_away(self._folder), ignore_errors=True)
                self._folder.rename(_put_away(self._folder))
            else:  # what was put away before is the last that is whole
                shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Release the log's file."""
        if self._log is not None:
            self._log.close()
            self._log = None


def keep(directory: str | os.PathLike[str], rounds: Rounds) -> bool:
    """Journal rounds in a directory, and go on from what another server of theirs left there; whether one did.

    rounds: new, before their first event. Raises CheckpointError for a journal that is damaged, or of others.
    """
    folder = Path(directory) / "rounds"
    try:
        states = checkpoint.complete_steps(folder, 0)
        if states:
            rounds.journal = _restored(folder, states[-1], rounds)
            return True
        put_away = checkpoint.complete_steps(_put_away(folder), 0)
        if put_away:
            _go_back(_put_away(folder), put_away[-1], rounds)
    except OSError as error:
        raise CheckpointError(
            f"The journal in {folder} cannot be read ({error}), so what devices were told is not known. Give the "
            "server the directory that it had, or an empty one to begin anew."
        ) from error
    rounds.journal = begun = FileRoundsJournal(folder, 0, None, rounds)
    begun.committed(rounds)
    return bool(put_away)


def refuse_others(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a journal's federation is not this one."""
    for what, value in mine.items():
        if kept[what] != value:
            raise CheckpointError(
                f"This journal is of a federation whose {what} was {kept[what]}, and this one's is {value}, so its "
                "devices would not understand. Begin anew in an empty directory."
            )


def _restored(folder: Path, number: int, rounds: Rounds) -> FileRoundsJournal:
    tree, _ = checkpoint.read(folder, number, 0)
    path = folder / _log_name(number)
    with _damage_said(folder):
        rounds.load_state_dict(tree)
        end = 0
        for change, end in _changes(path):  # noqa: B007
            rounds.change(change)
    return FileRoundsJournal(folder, number, Log(path, end), rounds)


def _go_back(folder: Path, number: int, rounds: Rounds) -> None:
    """Go on from a state after which versions were made that nobody kept, as another past."""
    tree, _ = checkpoint.read(folder, number, 0)
    with _damage_said(folder):
        rounds.load_state_dict(tree)
    rounds.begin_anew()
    notice(
        "The server that had this journal could not write it at its end. It goes on from the last version that was "
        f"written, which lies in {folder}; later ones are lost, and devices begin anew from it."
    )


@contextlib.contextmanager
def _damage_said(folder: Path) -> Iterator[None]:
    try:
        yield
    except PARSING as error:
        raise CheckpointError(
            f"The journal in {folder} is damaged ({type(error).__name__}: {error}), so what devices were told is not "
            "known. Remove it to begin anew, or bring back a copy."
        ) from error


def _changes(path: Path) -> Iterator[tuple[RosterChange, int]]:
    """All whole lines of a log, each with the offset of its end. A last one that is torn was never acted on.

    Raises ValueError for a whole line that is not what was written.
    """
    read = path.read_bytes() if path.is_file() else b""  # killed between the state and its log
    end = 0
    for line in read.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        checksum, _, text = line[:-1].partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError(f"the line at byte {end} of {path.name} has another checksum")
        end += len(line)
        yield _parsed(text.decode()), end


def _line(change: RosterChange) -> bytes:
    assigned = {client: (each.round, each.first, each.version) for client, each in change.assigned.items()}
    text = json.dumps([change.next_round, change.given, assigned, list(change.ended)]).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parsed(text: str) -> RosterChange:
    next_round, given, assigned, ended = read_json(text)
    found = {int(client): Assignment(*map(int, numbers)) for client, numbers in assigned.items()}
    return RosterChange(int(next_round), int(given), found, tuple(map(int, ended)))


def _log_name(number: int) -> str:
    return f"log-{number:08d}"


def _put_away(folder: Path) -> Path:
    return folder.with_name(folder.name + ".stopped")
