"""Files: the folder of a federation: atomically replaced files, a lock, and the identity for restarts.

DIRECTORY/federation.json   its name, recipe and model
DIRECTORY/enrollment.json   the number of each device
DIRECTORY/rounds.jsonl      one line per round
DIRECTORY/rounds/           the journal of its rounds"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gossamer.base import system
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.fsync import make_folder, write_file


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically. Raises CheckpointError if it cannot be written; the previous file stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        make_folder(path.parent)
        write_file(part, [text.encode()])
        os.replace(part, path)
        system.sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error}), so a restart would not find it. Free some space"
        ) from error


class FolderLock:
    """A lock on a folder for the lifetime of a process."""

    def __init__(self, folder: Path, why: str) -> None:
        """why: the harm of two processes, and the remedy. Raises CheckpointError if another process has the lock."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = system.open_file(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be used ({error}). Name another folder") from error
        try:
            system.lock_file(self._file.fileno())
        except OSError:
            self.close()
            raise CheckpointError(f"Another process uses {folder}. {why}") from None

    def close(self) -> None:
        self._file.close()


class FederationIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that two starts of one federation share."""

    federation: str
    recipe: str
    clients: int
    seed: int
    layout: str


def same_federation(directory: Path, identity: FederationIdentity) -> FederationIdentity:
    """Return the identity of the federation in a folder, or write `identity` if the folder has none.

    Raises CheckpointError, with both values, if the folder belongs to another federation.
    """
    path = directory / "federation.json"
    if not path.is_file():
        replace_file(path, msgspec.json.encode(identity).decode())
        return identity
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FederationIdentity)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Start again with another --journal") from error
    for key in ("recipe", "clients", "seed", "layout"):
        there, here = getattr(found, key), getattr(identity, key)
        if there != here:
            raise CheckpointError(
                f"{directory} holds another federation, of {key} {there!r} and not {here!r}, so continuing it would "
                "mix both. Name another folder: --journal OTHER; or start the server with the earlier settings"
            )
    return found
