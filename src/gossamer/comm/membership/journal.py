"""Journal: logs a coordinator's views before anybody hears of them, so that a restarted one goes on from them.

    b91c24ff {"most": 8}                            one line an entry, after the CRC-32 of its JSON
    5e0a1f60 {"view": {"number": 3, "members": ...   the last line may be torn, and is ignored then

An entry is on the disk before anybody is told. Secrets are not in it: a view whose secret is lost is followed by
another where somebody still needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from gossamer.base.json_text import read_json
from gossamer.comm.membership.view import Member, View
from gossamer.errors import CheckpointError, ConnectError

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """What a coordinator must not forget."""

    run: str = ""  # the run's identity: random, drawn when the journal begins
    view: int = 0  # the newest view's number; 0 before the first
    members: tuple[Member, ...] = ()
    newcomers: frozenset[int] = frozenset()
    fingerprint: str = ""  # of the first view's members
    finishing: bool = False  # a member has left because all is done
    most: int = 0  # members, where it was changed; else 0
    began: int = 0  # members of the first view; 0 in a journal that does not hold it
    ended: str = ""  # why the run is over
    launched: frozenset[int] = frozenset()  # numbers of the workers that the coordinator's own launcher has started

    def after(self, entry: Entry) -> Remembered:
        """With one more entry. Raises KeyError, TypeError or ValueError for one that no coordinator wrote."""
        changed = asdict(self) | {"members": self.members}
        for name, value in entry.items():
            if name == "view":
                changed |= {
                    "view": int(value["number"]),
                    "members": tuple(Member(number=n, host=host, port=port) for n, host, port in value["members"]),
                    "newcomers": frozenset(value["newcomers"]),
                }
            elif name == "launched":
                changed[name] = self.launched | {int(value)}
            else:
                changed[name] = type(changed[name])(value)
        return Remembered(**changed)


def view_entry(view: View) -> Entry:
    """Of a view, without its secret."""
    members = [[each.number, each.host, each.port] for each in view.members]
    return {"view": {"number": view.number, "members": members, "newcomers": sorted(view.newcomers)}}


class ViewJournal(Protocol):
    """Where a coordinator writes what it decided, before it tells anybody."""

    def load(self) -> Remembered: ...
    def append(self, entry: Entry) -> None: ...


class MemoryJournal:
    """A journal that lasts as long as this object: for one process, or several in a simulation."""

    def __init__(self) -> None:
        self._remembered = Remembered()

    def load(self) -> Remembered:
        return self._remembered

    def append(self, entry: Entry) -> None:
        self._remembered = self._remembered.after(entry)


class ViewLog:
    """A journal in a file that its owner alone may read.

    Raises ConnectError where another process has it, so that two coordinators never make views of one run, and
    CheckpointError where a line before the last is damaged. note: told once where the file cannot be written.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note, self._failed = path, note, False
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConnectError(
                f"the coordinator's journal {path} cannot be opened ({error.strerror}), and the run could not continue "
                "after a crash of this launcher. Start it where this user may write, or name another --logs folder."
            ) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remembered, end = _read(path)
            os.truncate(self._handle, end)
            _keep_name(path)
        except OSError as error:
            os.close(self._handle)
            raise ConnectError(
                f"{path} is the journal of a coordinator that still runs, or cannot be locked ({error.strerror}). "
                "Two of them would make two runs of one. Stop the other launcher, or start this one in another folder."
            ) from None
        except BaseException:
            os.close(self._handle)
            raise

    def load(self) -> Remembered:
        return self._remembered

    def append(self, entry: Entry) -> None:
        """Write an entry, and wait until the disk has it. A disk that fails is said once: training goes on."""
        line = json.dumps(entry)
        data = memoryview(f"{zlib.crc32(line.encode()):08x} {line}\n".encode())
        self._remembered = self._remembered.after(entry)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._note(
                    f"The coordinator's journal {self._path} cannot be written ({error.strerror}). The run goes on, "
                    "and ends if its coordinator is started again. Free some space before that."
                )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)


def _keep_name(path: Path) -> None:
    """Wait until the disk has the directory's entry."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path) -> tuple[Remembered, int]:
    """What a file holds, and where its last whole line ends."""
    remembered, end = Remembered(), 0
    content = path.read_bytes()
    while (newline := content.find(b"\n", end)) >= 0:
        line = content[end:newline]
        try:
            checksum, _, text = line.partition(b" ")
            if int(checksum, 16) != zlib.crc32(text):
                raise ValueError("its checksum is wrong")
            remembered = remembered.after(read_json(text))
        except (KeyError, TypeError, ValueError) as error:
            if newline + 1 < len(content):
                raise CheckpointError(
                    f"{path} is damaged before its end ({error!s:.100}), so nobody knows which workers belong to the "
                    "run. Remove this file, and start the run again from its last checkpoint."
                ) from None
            break
        end = newline + 1
    return remembered, end
