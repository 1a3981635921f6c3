"""Files: replaces small ones as a whole, whenever a process ends, and locks folders that belong to one process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.durable import make_folder, sync_folder, write_file


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
