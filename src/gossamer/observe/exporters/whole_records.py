"""Whole records: a file to which records are appended whole or not at all, also on a disk that becomes full."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class RecordsFile:
    """Makes the folders above it. One process writes it. Raises OSError; the next append may then do better."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.bytes = os.fstat(self._file).st_size

    def append(self, records: bytes) -> None:
        left = memoryview(records)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)  # or readers would stop at the torn record for good
            raise
        self.bytes += len(records)

    def ends_with(self, end: bytes) -> bool:
        return os.pread(self._file, len(end), max(0, self.bytes - len(end))) == end

    def close(self) -> None:
        os.close(self._file)
