"""A disk that counts operations, fails at one of them, and shows what of a folder outlives a power failure."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COUNTED = ("open", "write", "fsync", "mkdir", "replace", "rename", "unlink", "link", "rmdir")
WRITING = frozenset(COUNTED) - {"unlink", "rmdir", "open"}  # what a full disk refuses


@dataclass
class FakeDisk:
    """Watches everything below `root` through the module os.

    names: of the operations so far. before: called with each operation's number and name before it is made.
    What was synced: content by file, names by folder; files are known by open handles, so that no number is used twice.
    """

    root: Path
    names: list[str] = field(default_factory=list)
    before: Callable[[int, str], None] = lambda number, name: None
    contents: dict[int, bytes] = field(default_factory=dict)  # by inode
    entries: dict[int, dict[str, int]] = field(default_factory=dict)  # by the folder's inode
    held: list[int] = field(default_factory=list)
    real: dict[str, Any] = field(default_factory=lambda: {name: getattr(os, name) for name in COUNTED})

    def sync_all(self) -> None:
        """All that is there now is durable."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                self._synced(os.path.join(folder, name))
            self._synced(folder)

    def _synced(self, path: str | int) -> None:
        inode = os.stat(path).st_ino
        if inode not in self.contents and inode not in self.entries:
            self.held.append(self.real["open"](_path_of(path), os.O_RDONLY))
        where = Path(_path_of(path))
        if where.is_dir():
            self.entries[inode] = {each.name: each.stat().st_ino for each in where.iterdir()}
            for each in where.iterdir():
                self._hold(each)
        else:
            self.contents[inode] = where.read_bytes()

    def _hold(self, path: Path) -> None:
        self.held.append(self.real["open"](path, os.O_RDONLY))

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        watched = self._watches(name, args)
        if watched:
            self.before(len(self.names), name)
            self.names.append(name)
        answer = self.real[name](*args, **options)
        if watched and name == "fsync":
            self._synced(args[0])
        return answer

    def _watches(self, name: str, args: tuple[Any, ...]) -> bool:
        if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
            return False
        return str(_path_of(args[0])).startswith(str(self.root))

    def after_power_failure(self, to: Path, seed: int | None) -> Path:
        """What is found afterwards. Of what was not synced nothing; with a seed, any of the names and contents."""
        draw = None if seed is None else random.Random(seed)
        self._restore(self.root.stat().st_ino, self.root, to, draw)
        return to

    def _restore(self, inode: int, now: Path | None, to: Path, draw: random.Random | None) -> None:
        to.mkdir()
        there = {} if now is None else {each.name: each for each in sorted(now.iterdir())}
        synced = self.entries.get(inode, {})
        for name in sorted(set(there) | set(synced)):
            inodes = [synced.get(name), there[name].stat().st_ino if name in there else None]
            chosen = inodes[0] if draw is None else draw.choice(inodes)
            if chosen is None:
                continue
            path = there.get(name) if chosen == inodes[1] else None
            if chosen in self.entries or (path is not None and path.is_dir()):
                self._restore(chosen, path, to / name, draw)
            else:
                contents = [self.contents.get(chosen, b"")]
                if draw is not None and path is not None and not path.is_dir():
                    contents.append(path.read_bytes())
                (to / name).write_bytes(contents[0] if draw is None else draw.choice(contents))

    def close(self) -> None:
        for handle in self.held:
            os.close(handle)


def _path_of(path: Any) -> str:
    return os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)


@contextmanager
def watched(root: Path, before: Callable[[int, str], None] = lambda number, name: None) -> Iterator[FakeDisk]:
    disk = FakeDisk(root, before=before)
    disk.sync_all()
    with pytest.MonkeyPatch.context() as patched:
        for name in COUNTED:
            patched.setattr(os, name, lambda *args, name=name, **options: disk.call(name, *args, **options))
        try:
            yield disk
        finally:
            patched.undo()
            disk.close()
