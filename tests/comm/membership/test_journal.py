"""Journal of a coordinator: what is read back, torn ends, damage, and who may have it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import ItemsView
from pathlib import Path

import pytest

from gossamer.base import system
from gossamer.base.json_text import checked_line
from gossamer.comm.membership.journal import MemoryJournal, Remembered, ViewLog, view_entry
from gossamer.comm.membership.view import Member, View
from gossamer.errors import CheckpointError, ConnectError

SECRET = bytes(range(32))
MEMBERS = tuple(Member(number=number, host="h", port=number % 2**16) for number in (3, 1, 2**62))
VIEWS = [
    View(number=1, members=MEMBERS[:2], newcomers=frozenset(), secret=SECRET),
    View(number=2, members=MEMBERS, newcomers=frozenset({2**62}), secret=SECRET),
]
ENTRIES = [
    view_entry(VIEWS[0]),
    {"fingerprint": '{"torch": "2"}'},
    {"most": 3},
    view_entry(VIEWS[1]),
    {"finishing": True},
    {"ended": "it is"},
]
LAST = Remembered(
    view=2,
    members=MEMBERS,
    newcomers=frozenset({2**62}),
    fingerprint='{"torch": "2"}',
    most=3,
    finishing=True,
    ended="it is",
)


def written(path: Path) -> None:
    log = ViewLog(path, lambda note: None)
    for each in ENTRIES:
        log.append(each)
    assert log.load() == LAST
    log.close()


def read(path: Path) -> Remembered:
    log = ViewLog(path, lambda note: None)
    try:
        return log.load()
    finally:
        log.close()


def test_what_was_written_is_read_and_no_secret_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    assert read(path) == LAST
    memory = MemoryJournal()
    for each in ENTRIES:
        memory.append(each)
    assert memory.load() == LAST
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET.hex() not in path.read_text()


def test_wherever_the_last_line_is_torn_the_lines_before_it_count(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    whole = path.read_bytes()
    ends = [place + 1 for place, each in enumerate(whole) if each == ord("\n")]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        expected = Remembered()
        for entry, end in zip(ENTRIES, ends, strict=True):
            expected = expected.after(entry) if end <= size else expected
        assert read(path) == expected
        assert path.stat().st_size == max((end for end in ends if end <= size), default=0)


def test_after_a_torn_line_it_continues(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    path.write_bytes(path.read_bytes()[:-5])
    log = ViewLog(path, lambda note: None)
    log.append({"most": 7})
    log.close()
    assert (read(path).most, read(path).ended) == (7, "")


def test_a_damaged_last_line_counts_as_not_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    expected = Remembered()
    for entry in ENTRIES[:-1]:
        expected = expected.after(entry)
    assert read(path) == expected


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read(path)
    path.write_bytes(b"")
    read(path)  # nothing is locked or open any more


def test_two_coordinators_cannot_have_one_journal(tmp_path: Path) -> None:
    log = ViewLog(tmp_path / "journal", lambda note: None)
    with pytest.raises(ConnectError, match="another coordinator"):
        ViewLog(tmp_path / "journal", lambda note: None)
    log.close()
    ViewLog(tmp_path / "journal", lambda note: None).close()


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    notes: list[str] = []
    log = ViewLog(tmp_path / "journal", notes.append)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file.fileno())
    os.close(full)
    log.append(ENTRIES[0])
    log.append(ENTRIES[3])
    assert log.load().view == 2
    (note,) = notes
    assert "No space left" in note
    log.close()


def test_entries_that_a_full_disk_refused_are_written_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    log = ViewLog(tmp_path / "journal", notes.append)
    log.append(ENTRIES[0])
    write = system.write_all

    def fill(file: system.File, data: bytes) -> None:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(system, "write_all", fill)
        log.append(ENTRIES[1])
        log.append(ENTRIES[3])
    log.append(ENTRIES[4])
    known = log.load()
    log.close()
    assert (known.view, known.finishing, len(notes)) == (2, True, 1)
    assert read(tmp_path / "journal") == known


def test_an_entry_whose_synchronization_failed_is_in_the_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ViewLog(tmp_path / "journal", lambda note: None)

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(system, "sync_file", fail)
        log.append({"most": 3})
    log.append({"most": 4})
    log.close()
    assert (tmp_path / "journal").read_bytes() == checked_line({"most": 3}) + checked_line({"most": 4})


def test_entries_of_two_threads_are_both_remembered(tmp_path: Path) -> None:
    log = ViewLog(tmp_path / "journal", lambda note: None)
    other = threading.Thread(target=log.append, args=({"fingerprint": "{}"},))

    class Interrupted(dict[str, int]):
        """An entry during which the other thread runs."""

        def items(self) -> ItemsView[str, int]:
            if other.ident is None:
                other.start()
                other.join(0.1)
            return super().items()

    log.append(Interrupted(most=7))
    other.join()
    assert (log.load().most, log.load().fingerprint) == (7, "{}")
    log.close()


def test_an_entry_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that keeps only synchronized bytes has every entry that append has returned from."""
    path = tmp_path / "journal"
    synchronized: list[bytes] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        sync(handle)
        synchronized.append(path.read_bytes())

    log = ViewLog(path, pytest.fail)
    monkeypatch.setattr(os, "fsync", fsync)
    for most in (3, 4):
        log.append({"most": most})
        kept = tmp_path / f"after a power loss {most}"
        kept.write_bytes(synchronized[-1] if synchronized else b"")
        after = ViewLog(kept, pytest.fail)
        assert after.load().most == most
        after.close()
    log.close()


def test_closing_a_journal_again_closes_no_file_that_was_opened_meanwhile(tmp_path: Path) -> None:
    journal = ViewLog(tmp_path / "journal", pytest.fail)
    journal.close()
    with open(tmp_path / "other", "w") as other:  # has the number of the journal's file now
        journal.close()
        other.write("whole")
    assert (tmp_path / "other").read_text() == "whole"
