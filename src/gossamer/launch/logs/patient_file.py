"""Patient file: keeps what a full disk does not take until there is room, so that printing never ends a process."""

from __future__ import annotations

import errno
import io
import os
import threading
from typing import Any

MOST_WAITING_BYTES = 2**24
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE}
LOST = "[gossamer: {count} bytes are missing here, which found no room on the disk]\n"


class PatientFile(io.RawIOBase):
    """Writes to an open file, which stays the caller's; a write fails only where that is not the disk's fault.

    What the disk refuses waits in memory, up to 16 MB, for the next write. What is more is lost, and a line says how
    much in its place.
    """

    def __init__(self, file: int, name: str = "") -> None:
        super().__init__()
        self._file, self.name = file, name
        self._waiting = b""
        self._lost = 0  # bytes that would come after what waits
        self._lock = threading.RLock()  # a signal's handler may print, too

    def write(self, data: Any, /) -> int:
        with self._lock:
            given = bytes(data)
            self._flush()
            if self._waiting and len(self._waiting) + len(given) > MOST_WAITING_BYTES:
                self._lost += len(given)
            else:
                self._waiting += self._told_lost() + given
                self._flush()
            return len(given)

    def fileno(self) -> int:
        return self._file

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def _told_lost(self) -> bytes:
        lost, self._lost = self._lost, 0
        return LOST.format(count=lost).encode() if lost else b""

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as problem:
            if problem.errno not in DISK:
                raise
