"""Journal of rounds: a state for each version and a log of later tasks, to continue after the server was killed.

    DIRECTORY/rounds/step-00000003/...     the state after the third version, in the format of checkpoints
    DIRECTORY/rounds/log-00000003          tasks given or ended since then, one per line
    DIRECTORY/rounds.stopped/              the last of these before the disk was full, until a write succeeds again

The server logs a task before it sends the task to a device, and saves a version before it sends any receipt. A
restarted server therefore never contradicts an earlier answer. This holds for a killed process. A power failure can
lose the last lines of the log: devices then train again, but no version or round that a device knows of is lost.

A server without a journal, or with only a folder `rounds.stopped`, starts a new lineage with its own random name.
Devices with versions of another lineage reset their state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.base import system
from gossamer.base.json_text import checked_line, read_checked_lines
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.federated.server.roster import Assignment, RosterChange
from gossamer.train import checkpoint
from gossamer.train.parameter_server.journal import Log

if TYPE_CHECKING:
    from gossamer.federated.server.rounds import Rounds

PARSING = (ValueError, TypeError, KeyError, LookupError, AttributeError, RuntimeError)


class RoundsJournal(ABC):
    """Storage that a killed server continues from. If a write fails, it gives notice once, and raises an error only if
    the rounds must be journaled."""

    @abstractmethod
    def changed(self, change: RosterChange) -> None:
        """Assignments were made or ended. Called before the devices are answered."""

    @abstractmethod
    def committed(self, rounds: Rounds) -> None:
        """A version was made. Called before any receipt is sent."""


class FileRoundsJournal(RoundsJournal):
    """The journal in `folder`.

    Args:
        folder: the directory of the journal.
        number: of the state that the log continues.
        log: None if there is no state.
        rounds: the federation. If its rounds must be journaled, a failed write raises CheckpointError.
    """

    def __init__(self, folder: Path, number: int, log: Log | None, rounds: Rounds) -> None:
        self._folder, self._number, self._log, self._required = folder, number, log, rounds.must_be_journaled
        self._round = rounds.next_round  # on disk
        self._failed = False

    def changed(self, change: RosterChange) -> None:
        if self._log is None:
            return
        try:
            self._log.append([_line(change)])
            if change.next_round > self._round:  # no version records this round, but a device may know it
                self._log.sync()
                system.sync_folder(self._folder)
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
        (self._folder / _log_name(number)).unlink(missing_ok=True)  # of an incomplete state
        checkpoint.complete(self._folder, number, 0, [digest], {}, keep=1)
        self.close()
        self._number, self._log, self._round = number, Log(self._folder / _log_name(number)), rounds.next_round
        if self._failed:
            notice(f"The journal in {self._folder} is written again; a restarted server continues from there.")
        self._failed = False
        shutil.rmtree(_put_away(self._folder), ignore_errors=True)  # outdated
        for path in self._folder.glob("log-*"):
            if path.name != _log_name(number):
                path.unlink(missing_ok=True)

    def _give_up(self, error: Exception) -> None:
        """Continue without a journal, and rename its folder, so that no server continues from an outdated state."""
        if self._required:
            self.close()
            raise CheckpointError(
                f"The journal in {self._folder} cannot be written ({error}). It records the privacy budget that is "
                "spent, and without it the server could spend the budget of devices twice. The server stops before "
                "any device receives an answer that is not recorded. Free some space, and restart the server with the "
                "same journal: it continues from there."
            ) from error
        if not self._failed:
            notice(
                f"The journal in {self._folder} cannot be written ({error}). The server continues without it; after a "
                "restart it would continue from the last version that was written. Free some space: the server tries "
                "again at every version."
            )
        self._failed = True
        self.close()
        with contextlib.suppress(OSError):
            if checkpoint.complete_steps(self._folder, 0):
                shutil.rmtree(_put_away(self._folder), ignore_errors=True)
                self._folder.rename(_put_away(self._folder))
            else:  # the folder that was renamed before is the last complete one
                shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Release the log's file."""
        if self._log is not None:
            self._log.close()
            self._log = None


def keep(directory: str | os.PathLike[str], rounds: Rounds) -> bool:
    """Journal rounds in a directory, and continue from a journal of the same federation there.

    Args:
        directory: parent of the journal's folder.
        rounds: new, before their first event.

    Returns:
        Whether there was a journal to continue from.

    Raises:
        CheckpointError: the journal is damaged, or belongs to another federation.
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
            f"The journal in {folder} cannot be read ({error}), so the server cannot continue the federation. Give the "
            "server the directory that it had, or an empty one to start again."
        ) from error
    rounds.journal = begun = FileRoundsJournal(folder, 0, None, rounds)
    begun.committed(rounds)
    return bool(put_away)


def refuse_others(kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a journal belongs to another federation."""
    for what, value in own.items():
        if kept[what] != value:
            raise CheckpointError(
                f"This journal is of a federation with {what} {kept[what]}, but this one has {value}, so its "
                "devices would send incompatible messages. Start again in an empty directory."
            )


def _restored(folder: Path, number: int, rounds: Rounds) -> FileRoundsJournal:
    tree, _ = checkpoint.read(folder, number, 0)
    path = folder / _log_name(number)
    with _damage_reported(folder):
        rounds.load_state_dict(tree)
        end = 0
        for change, end in _changes(path):  # noqa: B007
            rounds.change(change)
    return FileRoundsJournal(folder, number, Log(path, end), rounds)


def _go_back(folder: Path, number: int, rounds: Rounds) -> None:
    """Continue from an outdated state as a new lineage, since later versions are lost."""
    tree, _ = checkpoint.read(folder, number, 0)
    with _damage_reported(folder):
        rounds.load_state_dict(tree)
    rounds.start_over()
    notice(
        "The last server with this journal could not write it at its end. This server continues from the last version "
        f"that was written, in {folder}; later ones are lost, and devices start again from it."
    )


@contextlib.contextmanager
def _damage_reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except PARSING as error:
        raise CheckpointError(
            f"The journal in {folder} is damaged ({type(error).__name__}: {error}), so the server cannot continue the "
            "federation. Remove it to start again, or restore a copy."
        ) from error


def _changes(path: Path) -> Iterator[tuple[RosterChange, int]]:
    """Yield each complete line of a log with the offset of its end. An incomplete last line was never acted on.

    Raises ValueError for a damaged complete line.
    """
    content = path.read_bytes() if path.is_file() else b""  # killed between the state and its log
    for value, end in read_checked_lines(content):
        yield _parsed(value), end


def _line(change: RosterChange) -> bytes:
    assigned = {client: (each.round, each.first, each.version) for client, each in change.assigned.items()}
    return checked_line([change.next_round, change.given, assigned, list(change.ended)])


def _parsed(value: Any) -> RosterChange:
    next_round, given, assigned, ended = value
    found = {int(client): Assignment(*map(int, numbers)) for client, numbers in assigned.items()}
    return RosterChange(int(next_round), int(given), found, tuple(map(int, ended)))


def _log_name(number: int) -> str:
    return f"log-{number:08d}"


def _put_away(folder: Path) -> Path:
    return folder.with_name(folder.name + ".stopped")
