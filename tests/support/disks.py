"""Small disks of memory that are full or read-only, for tests that run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a disk needs root and the mount command"
)


@dataclass
class Disk:
    """folder: where it is written; view: where it is read, in another place once it was asked for."""

    folder: Path
    view: Path

    def read_only(self) -> None:
        _run("mount", "-o", "remount,ro", str(self.folder))

    def read_only_view(self) -> None:
        """As another machine sees a disk that this one writes to."""
        self.view = self.folder.parent / "elsewhere" / self.folder.name
        self.view.mkdir(parents=True)
        _run("mount", "--bind", str(self.folder), str(self.view))
        _run("mount", "-o", "remount,bind,ro", str(self.view))

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self) -> Path:
        """Leave no room; the file that takes it."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(2**16)):
                    pass
            except OSError:
                return filler
        raise AssertionError("a disk without end")


@contextmanager
def mounted(tmp_path: Path, megabytes: int) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    disk = Disk(folder, folder)
    try:
        yield disk
    finally:
        for place in {disk.view, folder}:
            _run("umount", "--lazy", str(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
