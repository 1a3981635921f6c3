"""Patient files: a full disk ends no print, and what it refused comes once there is room, or is counted."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import mounted, needs_root
from support.exporting import disk_with_room_for

from gossamer.launcher import process_logs
from gossamer.launcher.process_logs import PatientFile


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    yield opened
    os.close(opened)


def test_what_a_full_disk_refused_comes_in_order_once_there_is_room(
    tmp_path: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.TextIOWrapper(PatientFile(file), encoding="utf-8", write_through=True)
    make_room = disk_with_room_for(10, monkeypatch)
    for number in range(5):
        print("line", number, file=text)
    assert len((tmp_path / "log").read_bytes()) <= 10
    make_room()
    print("line 5", file=text)
    assert (tmp_path / "log").read_text().splitlines() == [f"line {number}" for number in range(6)]


def test_what_is_too_much_is_counted_in_its_place(tmp_path: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "MOST_WAITING_BYTES", 20)
    raw = PatientFile(file)
    make_room = disk_with_room_for(0, monkeypatch)
    for _ in range(4):
        assert raw.write(b"nine by.\n") == 9
    make_room()
    raw.write(b"again\n")
    assert (tmp_path / "log").read_text().splitlines() == [
        *["nine by."] * 2,
        "[gossamer: 18 bytes are missing here: the disk was full]",
        "again",
    ]


def test_what_is_no_fault_of_a_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(file: int, data: bytes) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(os, "write", closed)
    with pytest.raises(OSError, match="Bad file"):
        PatientFile(1).write(b"text")


@needs_root
@pytest.mark.namespaces
def test_on_a_real_full_disk(tmp_path: Path) -> None:
    """The broken twin is a plain file, whose print ends the loop."""
    with mounted(tmp_path, megabytes=1) as disk:
        opened = os.open(disk.folder / "log", os.O_WRONLY | os.O_CREAT)
        filler = disk.fill()
        text = io.TextIOWrapper(PatientFile(opened), encoding="utf-8", write_through=True)
        for number in range(1000):
            print("line", number, "x" * 100, file=text)
        with pytest.raises(OSError, match="No space left"):
            os.write(opened, bytes(2**16))
        filler.unlink()
        os.truncate(disk.folder / "log", 0)  # what the twin may have left
        os.lseek(opened, 0, os.SEEK_SET)
        print("line 1000", file=text)
        found = (disk.folder / "log").read_text().splitlines()
        os.close(opened)
    assert found[-1] == "line 1000"
    assert [line.split()[1] for line in found] == [str(number) for number in range(1001 - len(found), 1001)]
    assert len(found) > 900
