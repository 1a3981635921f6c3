"""Run token: a secret file by which a run's processes authenticate. Creates, validates and reads the file."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from gossamer.base import bounded_file, system
from gossamer.errors import ConnectError

TOKEN_BYTES = 32  # minimum size of the file, and the size of its digest
MOST_TOKEN_BYTES = 2**20


def make_token_file(directory: Path) -> Path:
    """Create a token file with mode 0600."""
    return make_token(directory / "token")


def make_token(path: Path, token: bytes | None = None) -> Path:
    """Create a new token file, with a random token or the given one. Raises OSError if the path exists."""
    with system.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as file:
        system.write_all(file, token or secrets.token_bytes(TOKEN_BYTES))
    return path


def write_secret(path: Path, text: str) -> None:
    """Write a line to a new file with mode 0600, in place of an earlier file. Raises OSError."""
    path.unlink(missing_ok=True)
    make_token(path, f"{text}\n".encode())


def check_token_file(path: Path) -> Path:
    """Return the absolute path of the user's token file. Raises ConnectError if the token is missing or unsafe."""
    command = f"(umask 077; head -c {TOKEN_BYTES} /dev/urandom > {path})"
    make = f"Copy that of the run, with mode 0600, or create one for a new run: {command}"
    try:
        found = path.stat()
    except OSError as problem:
        raise ConnectError(
            f"the token file {path}, which authenticates the run's processes, cannot be read: {problem.strerror}. "
            f"{make}"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_size < TOKEN_BYTES:
        raise ConnectError(
            f"the token file {path} is not a regular file of at least {TOKEN_BYTES} bytes; a shorter token can be "
            f"guessed. Use another name. {make}"
        )
    if found.st_size > MOST_TOKEN_BYTES:
        raise ConnectError(
            f"the token file {path} has {found.st_size} bytes; at most {MOST_TOKEN_BYTES} are allowed. Use another "
            f"name. {make}"
        )
    if not system.is_private(found):
        raise ConnectError(
            f"the token file {path} (mode {stat.S_IMODE(found.st_mode):04o}) is accessible to other users. They "
            f"could join the run. Write: chmod 600 {path}"
        )
    return path.resolve()


def run_token() -> bytes | None:
    """Return the SHA-256 of this run's token file; None if the launcher named none. Raises ConnectError."""
    name = os.environ.get("GOSSAMER_TOKEN_FILE")
    return read_token(name) if name else None


def read_token(name: str | os.PathLike[str]) -> bytes:
    """Return the SHA-256 of a token file, as the token of Credentials. Raises ConnectError for an invalid file.

    Args:
        name: path of the file, of at least 32 bytes.
    """
    try:
        token = bounded_file.read_bytes(Path(name), MOST_TOKEN_BYTES)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConnectError(
            f"the run's token cannot be read from {name} ({why}), so other processes would reject this one. "
            "Pass a readable file: --token-file FILE."
        ) from None
    if len(token) < TOKEN_BYTES:
        raise ConnectError(
            f"the token in {name} has only {len(token)} bytes, so it can be guessed. Write: "
            f"head -c {TOKEN_BYTES} /dev/urandom > {name}"
        )
    return hashlib.sha256(token).digest()
