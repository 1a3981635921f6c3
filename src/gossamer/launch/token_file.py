"""The secret by which the processes of one run know each other: in a file, never in arguments, environment or logs."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from gossamer.environment.servers import TOKEN_BYTES
from gossamer.errors import ConnectError


def make_token_file(directory: Path) -> Path:
    """A new file of random bytes that its owner alone may read."""
    path = directory / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(TOKEN_BYTES))
    return path


def check_token_file(path: Path) -> Path:
    """The absolute path of a file that can serve as the secret; ConnectError says what is wrong with it."""
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
    if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise ConnectError(
            f"{path} (mode {stat.S_IMODE(found.st_mode):04o}) is open to others on this machine, who could then join "
            f"the run. Write: chmod 600 {path}"
        )
    return path.resolve()
