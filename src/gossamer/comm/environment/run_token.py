"""Run token: a secret file by which a run's processes prove that they belong to it; made, checked and read here."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from gossamer.base import bounded_file
from gossamer.errors import ConnectError

TOKEN_BYTES = 32  # at least, in a file; a digest has as many
MOST_TOKEN_BYTES = 2**20


def make_token_file(directory: Path) -> Path:
    """Make a token file that its owner alone may read."""
    return make_token(directory / "token")


def make_token(path: Path, token: bytes | None = None) -> Path:
    """Make a token at a path where nothing is yet, or write this one there. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(token or secrets.token_bytes(TOKEN_BYTES))
    return path


def check_token_file(path: Path) -> Path:
    """The absolute path of the user's token file. Raises ConnectError where it would protect nothing."""
    make = f"Make one: (umask 077; head -c {TOKEN_BYTES} /dev/urandom > {path})"
    try:
        found = path.stat()
    except OSError as problem:
        raise ConnectError(
            f"{path} cannot be the run's token, by which its processes know each other: {problem.strerror}. {make}"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_size < TOKEN_BYTES:
        raise ConnectError(
            f"{path} is no file of at least {TOKEN_BYTES} bytes, and a token that can be guessed protects nothing. "
            f"Take another name. {make}"
        )
    if found.st_size > MOST_TOKEN_BYTES:
        raise ConnectError(
            f"{path} has {found.st_size} bytes, and a token has at most {MOST_TOKEN_BYTES}. Take another name. {make}"
        )
    if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise ConnectError(
            f"{path} (mode {stat.S_IMODE(found.st_mode):04o}) is open to others on this machine, who could then join "
            f"the run. Write: chmod 600 {path}"
        )
    return path.resolve()


def run_token() -> bytes | None:
    """The SHA-256 of this run's token file; None where the launcher named none. Raises ConnectError."""
    name = os.environ.get("GOSSAMER_TOKEN_FILE")
    return read_token(name) if name else None


def read_token(name: str | os.PathLike[str]) -> bytes:
    """The SHA-256 of a token file. Raises ConnectError."""
    try:
        token = bounded_file.read_bytes(Path(name), MOST_TOKEN_BYTES)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConnectError(
            f"The run's token cannot be read from {name} ({why}), so no server would talk to this "
            "process. Name a file that it may read: --token-file FILE."
        ) from None
    if len(token) < TOKEN_BYTES:
        raise ConnectError(
            f"The token in {name} has {len(token)} bytes, and one that can be guessed protects nothing. Write: "
            f"head -c {TOKEN_BYTES} /dev/urandom > {name}"
        )
    return hashlib.sha256(token).digest()
