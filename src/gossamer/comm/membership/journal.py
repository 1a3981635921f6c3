"""Journal: logs each of a coordinator's views before any worker receives it, so that a restarted coordinator recovers.

    b91c24ff {"most": 8}                            one entry per line, preceded by the CRC-32 of its JSON
    5e0a1f60 {"view": {"number": 3, "members": ...   an incomplete last line is ignored

Each entry is on disk before any worker is notified. The journal holds no secrets: if a member needs the lost secret of
a view, the coordinator creates another view.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gossamer.base import system
from gossamer.base.json_text import checked_line, read_checked_lines
from gossamer.comm.membership.view import Member, View
from gossamer.errors import CheckpointError, ConnectError

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Issued:
    """An invitation, without its secret.

    Args:
        number: by which it can be revoked.
        expires: seconds since the epoch; None for no expiration.
        uses: maximum number of machines; None for no limit.
        machines: random numbers of the machines that have used it; without a limit none are kept.
        revoked: whether it was revoked.
    """

    number: int
    expires: float | None = None
    uses: int | None = None
    machines: frozenset[int] = frozenset()
    revoked: bool = False

    def record(self) -> Mapping[str, Any]:
        """As JSON."""
        return asdict(self) | {"machines": sorted(self.machines)}


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """State that a coordinator recovers after a restart."""

    run: str = ""  # random identity of the run, drawn when the journal is created
    view: int = 0  # number of the newest view; 0 before the first
    members: tuple[Member, ...] = ()
    newcomers: frozenset[int] = frozenset()
    fingerprint: str = ""  # of the members of the first view
    finishing: bool = False  # a member has left because its training is complete
    most: int = 0  # maximum number of members if it was changed; else 0
    began: int = 0  # members of the first view; 0 in journals without this entry
    ended: str = ""  # why the run has ended
    launched: frozenset[int] = frozenset()  # numbers of the workers that the coordinator's launcher has started
    invitations: Mapping[int, Issued] = field(default_factory=dict)  # by number

    def after(self, entry: Entry) -> Remembered:
        """Apply one more entry. Raises KeyError, TypeError or ValueError for an invalid one."""
        changed = dict(vars(self))
        for name, value in entry.items():
            if name == "view":
                changed |= {
                    "view": int(value["number"]),
                    "members": tuple(map(Member.of, value["members"])),
                    "newcomers": frozenset(value["newcomers"]),
                }
            elif name == "invitation":
                issued = Issued(**value | {"machines": frozenset(value["machines"])})
                changed["invitations"] = {**self.invitations, issued.number: issued}
            elif name == "launched":
                changed[name] = self.launched | {int(value)}
            else:
                changed[name] = type(changed[name])(value)
        return Remembered(**changed)


def view_entry(view: View) -> Entry:
    """Journal entry of a view, without its secret."""
    members = [each.record() for each in view.members]
    return {"view": {"number": view.number, "members": members, "newcomers": sorted(view.newcomers)}}


class ViewJournal(Protocol):
    """Storage for a coordinator's decisions, written before workers are notified."""

    def load(self) -> Remembered: ...
    def append(self, entry: Entry) -> None: ...


class MemoryJournal:
    """A journal in memory, for a single process or a simulation."""

    def __init__(self) -> None:
        self._remembered = Remembered()

    def load(self) -> Remembered:
        return self._remembered

    def append(self, entry: Entry) -> None:
        self._remembered = self._remembered.after(entry)


class ViewLog:
    """A journal in a file with mode 0600.

    Args:
        path: The file; it is locked, so that only one coordinator creates the views of a run.
        note: Called once with a message if the file cannot be written.

    Raises:
        ConnectError: The file cannot be opened, or another process holds its lock.
        CheckpointError: A line before the last one is damaged.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note, self._failed = path, note, False
        self._appends = threading.Lock()  # the launcher's thread and the coordinator's append
        self._unwritten = b""  # entries that the disk has refused
        try:
            self._file = system.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConnectError(
                f"the coordinator's journal {path} cannot be opened ({error.strerror}), so the run could not continue "
                "after a crash of this launcher. Start it in a writable folder, or pass another --logs folder."
            ) from None
        try:
            system.lock_file(self._file.fileno())
            self._remembered, self._end = _read(path)
            self._file.truncate(self._end)
            system.sync_folder(path.parent)
        except OSError as error:
            self._file.close()
            raise ConnectError(
                f"the coordinator's journal {path} is in use by another coordinator, or cannot be locked "
                f"({error.strerror}). Two coordinators would split the run. Stop the other launcher, or start this one "
                "in another folder."
            ) from None
        except BaseException:
            self._file.close()
            raise

    def load(self) -> Remembered:
        return self._remembered

    def append(self, entry: Entry) -> None:
        """Write an entry and wait for fsync. Thread-safe.

        A write error is reported once, and training continues. The next call writes the entry again.
        """
        with self._appends:
            self._remembered = self._remembered.after(entry)
            refused, self._unwritten = self._unwritten, self._unwritten + checked_line(entry)
            try:
                if refused:
                    self._file.truncate(self._end)  # a part of them may be in the file
                system.write_all(self._file, self._unwritten)
                system.sync_file(self._file.fileno())
            except OSError as error:
                self._report(error)
            else:
                self._end, self._unwritten = self._end + len(self._unwritten), b""

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            self._note(
                f"The coordinator's journal {self._path} cannot be written ({error.strerror}). The run continues, "
                "but it ends if its coordinator restarts. Free disk space before that."
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _read(path: Path) -> tuple[Remembered, int]:
    """Return the recovered state, and the offset behind the last complete line."""
    remembered, end = Remembered(), 0
    content = path.read_bytes()
    try:
        for entry, after in read_checked_lines(content):
            remembered, end = remembered.after(entry), after
    except (KeyError, TypeError, ValueError) as error:
        if content.find(b"\n", end) + 1 < len(content):
            raise CheckpointError(
                f"the journal {path} is damaged before its last line ({error!s:.100}), so the members of the run "
                "are unknown. Delete this file, and restart the run from its last checkpoint."
            ) from None
    return remembered, end
