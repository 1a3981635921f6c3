"""Folder of a run's logs: created, locked, and with a private directory during the run."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from gossamer.base import system
from gossamer.base.run_files import RunFiles
from gossamer.launcher import parent_watchdog
from gossamer.observe.control_sequences import without_controls

LOCK_FILE = ".lock"
MOST_OWNER_BYTES = 300  # shown bytes of a lock file
IN_USE = (
    "{logs} is used by another run ({owner}): the runs would overwrite each other's record and store. Use another "
    "folder for each launcher: write --logs DIRECTORY, or leave out --logs"
)


def next_logs() -> Path:
    """Default folder for the logs of a run that starts now."""
    return Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")


def new_logs() -> Path:
    """Create a folder for this run's logs: runs/TIME, with a number if two runs start in the same second."""
    stem = next_logs()
    names = [stem, *(stem.with_name(f"{stem.name}_{number}") for number in range(2, 100))]
    for name in names:
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _nowhere(name, error) from error
        return name
    raise click.ClickException(f"There are already {len(names)} directories like {stem}. Write --logs DIR")


@contextmanager
def private_directory(logs: Path) -> Iterator[Path]:
    """Private directory on the same disk as the logs; removed at the end, except event logs without a record.

    Stacks and operations of an earlier run in `logs` are removed: they would be taken for this run's, since it may have
    fewer ranks.

    Raises click.UsageError if `logs` is not writable, or another run uses it.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
        lock = _lock(logs)
    except OSError as error:
        raise _nowhere(logs, error) from error
    try:
        try:
            directory = Path(tempfile.mkdtemp(prefix=".run-", dir=logs)).resolve()
        except OSError as error:
            raise _nowhere(logs, error) from error
        earlier = RunFiles(logs)
        for path in (*earlier.all_stacks(), *earlier.all_flights()):
            with suppress(OSError):
                path.unlink()
        try:
            yield directory
        finally:
            parent_watchdog.remove(directory)
    finally:
        with suppress(PermissionError):  # Windows keeps the name of an open file
            (logs / LOCK_FILE).unlink(missing_ok=True)
        lock.close()


def _lock(logs: Path) -> system.File:
    """Lock the folder until the returned file is closed or this process ends. Raises click.UsageError."""
    while True:
        file = system.open_file(logs / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            system.lock_file(file.fileno())
        except (BlockingIOError, PermissionError):
            owner = file.read(MOST_OWNER_BYTES).decode(errors="replace")
            file.close()
            raise click.UsageError(
                IN_USE.format(logs=logs, owner=without_controls(owner) or "of another process")
            ) from None
        except OSError:
            return file  # the file system has no locks
        if _is_there(logs / LOCK_FILE, file):
            with suppress(OSError):  # a full disk
                file.truncate(0)
                file.write(f"pid {os.getpid()} on {socket.gethostname()}".encode())
            return file
        file.close()  # the last run has just ended and removed its file


def _is_there(path: Path, file: system.File) -> bool:
    """Whether `path` is the name of this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _nowhere(logs: Path, error: OSError) -> click.UsageError:
    return click.UsageError(
        f"the logs and the record of this run would be written to {logs}, which is not writable "
        f"({error.strerror}). Write --logs DIRECTORY, or start in another folder"
    )
