"""Fsync: makes files and folders durable, by name and content, before the calls return.

A file's content is durable after syncing the file; its name, and a rename, after syncing its folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gossamer.base import system
from gossamer.train.checkpoint.pytree import DIGEST_BYTES

# Errors of file systems without hard links
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def make_folder(folder: Path) -> None:
    """Make a folder and all missing parents, each of them durable before the next is made in it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):  # made by another rank; if it is a file, writing into it fails
        folder.mkdir()
    system.sync_folder(folder.parent)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write and sync a new file. Returns its digest. Its name is durable after the folder is synced."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with system.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for piece in pieces:
            running.update(piece)
            system.write_all(file, piece)
        system.sync_file(file.fileno())
    return running.hexdigest()


def link_file(path: Path, to: Path) -> None:
    """Give a file a second name, or make a synced copy on file systems without hard links."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(path, to)
        with system.open_file(to, os.O_RDONLY) as file:
            system.sync_file(file.fileno())


def move_folder(folder: Path, to: Path) -> None:
    """Rename a folder. Raises FileNotFoundError if it does not exist any more."""
    make_folder(to.parent)
    folder.rename(to)
    system.sync_folder(to.parent)
    system.sync_folder(folder.parent)
