"""Files: a federation's folder: small files replaced as a whole, a lock, and the identity that restarts share.

DIRECTORY/federation.json   its name, recipe and model
DIRECTORY/enrollment.json   the number of each device
DIRECTORY/rounds.jsonl      a line for each round
DIRECTORY/rounds/           the journal of its rounds"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.fsync import make_folder, sync_folder, write_file


def replace_file(path: Path, text: str) -> None:
    """Raises CheckpointError where the disk is full; the file before stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        make_folder(path.parent)
        write_file(part, [text.encode()])
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error}), so a restart would not know of it. Free some space"
        ) from error


class FolderLock:
    """A folder belongs to one process, for as long as that lives."""

    def __init__(self, folder: Path, why: str) -> None:
        """why: what two processes would do, and what to write instead. Raises CheckpointError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be used ({error}). Name another folder") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise CheckpointError(f"Another process uses {folder}. {why}") from None

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class FederationIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two starts of a server the same federation."""

    federation: str
    recipe: str
    clients: int
    seed: int
    layout: str


def same_federation(directory: Path, identity: FederationIdentity) -> FederationIdentity:
    """The identity of the federation in a folder, which is this one's where there was none.

    Raises CheckpointError, with both values, where another federation lies there.
    """
    path = directory / "federation.json"
    if not path.is_file():
        replace_file(path, msgspec.json.encode(identity).decode())
        return identity
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FederationIdentity)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Begin anew with another --journal") from error
    for key in ("recipe", "clients", "seed", "layout"):
        there, here = getattr(found, key), getattr(identity, key)
        if there != here:
            raise CheckpointError(
                f"{directory} holds another federation, of {key} {there!r} and not {here!r}, so going on from it would "
                "mix both. Name another folder: --journal OTHER; or start the server as it was started before"
            )
    return found
