"""Device directory: what makes a restarted process the same device: its identity, and a lock while one runs."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from gossamer.errors import CheckpointError
from gossamer.federated.client.directory_store import DirectoryStore
from gossamer.federated.deployment.files import replace_file

IDENTITY_BITS = 62  # of a number that fits wherever one of 64 bits does


def new_identity() -> int:
    return secrets.randbits(IDENTITY_BITS)


class DeviceDirectory:
    """DIRECTORY/device holds the identity, and DIRECTORY/FEDERATION/ what the device keeps of each federation."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where another process uses it, or nothing can be written."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be used ({error}). Name another: --state DIRECTORY") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(
                f"Another process is the device in {directory}, and two of them would send each other's contributions. "
                "End it, or give this one a directory of its own: --state OTHER"
            ) from None
        self.identity = self._identity()

    def store(self, federation: str, number: int) -> DirectoryStore:
        return DirectoryStore(self._directory / federation, number)

    def close(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _identity(self) -> int:
        path = self._directory / "device"
        try:
            return int(path.read_text(), 16) % (1 << IDENTITY_BITS)
        except FileNotFoundError:
            drawn = new_identity()
            replace_file(path, f"{drawn:x}\n")
            return drawn
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so this device cannot say who it was. Remove {self._directory}: the "
                "device begins anew, and loses what its feedback kept"
            ) from error
