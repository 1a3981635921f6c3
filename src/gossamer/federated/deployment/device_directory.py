"""Device directory: what makes a restarted process the same device: its identity, and a lock while one runs."""

from __future__ import annotations

import secrets
from pathlib import Path

from gossamer.errors import CheckpointError
from gossamer.federated.client.directory_store import DirectoryStore
from gossamer.federated.deployment.files import FolderLock, replace_file

IDENTITY_BITS = 62  # of a number that fits wherever one of 64 bits does


def new_identity() -> int:
    return secrets.randbits(IDENTITY_BITS)


class DeviceDirectory:
    """DIRECTORY/device holds the identity, and DIRECTORY/FEDERATION/ what the device keeps of each federation."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where another process uses it, or nothing can be written."""
        self._directory = directory
        self._lock = FolderLock(
            directory,
            "Two of them would send each other's contributions: end it, or give this one a folder of its own: --state "
            "OTHER",
        )
        self.identity = self._identity()

    def store(self, federation: str, number: int) -> DirectoryStore:
        return DirectoryStore(self._directory / federation, number)

    def close(self) -> None:
        self._lock.close()

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
