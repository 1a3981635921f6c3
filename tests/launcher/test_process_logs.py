"""The broken twin of the test above."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import mounted, needs_root
from support.exporting import disk_with_room_for

from gossamer.base.run_files import RunFiles, write_json
from gossamer.launcher import process_logs
from gossamer.launcher.job import Job
from gossamer.launcher.process_logs import LineReader, PatientFile, WorkerLog, log_path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "output.txt"


def test_a_file_that_does_not_exist_yet_has_no_lines(path: Path) -> None:
    assert list(LineReader(path).lines()) == []


def test_a_line_appears_once_it_is_complete(path: Path) -> None:
    reader = LineReader(path)
    append(path, b"one\ntw")
    assert list(reader.lines()) == ["one"]
    append(path, b"o\n\nthree")
    assert list(reader.lines()) == ["two", ""]
    assert list(reader.rest()) == ["three"]
    assert list(reader.rest()) == []


def test_a_letter_split_over_two_reads_stays_whole(path: Path) -> None:
    reader, letters = LineReader(path), "größer ✓ 猫".encode()
    heard = []
    for place in range(len(letters)):
        append(path, letters[place : place + 1])
        heard += reader.lines()
    append(path, b"\n")
    assert heard + list(reader.lines()) == ["größer ✓ 猫"]


def test_decoding_each_read_by_itself_would_break_letters() -> None:
    """The broken twin of the test above."""
    data = "✓".encode()
    assert "".join(data[i : i + 1].decode(errors="replace") for i in range(len(data))) != "✓"


def test_bytes_that_are_no_text_do_not_stop_it(path: Path) -> None:
    append(path, b"\xff\xfe ok\n")
    assert list(LineReader(path).lines()) == ["�� ok"]


def test_of_a_rewritten_line_the_last_version_counts(path: Path) -> None:
    reader = LineReader(path)
    append(path, b" 10%\r 50%\r")
    assert list(reader.lines()) == []
    append(path, b"100%\r\nnext\r\n")
    assert list(reader.lines()) == ["100%", "next"]


def test_the_latest_version_of_an_unfinished_line_is_to_be_had(path: Path) -> None:
    reader, heard = LineReader(path), []
    for data in (b"no bar", b" yet\n", b"\r 10%", b"\r 20", b"%", b"\r 30%\r", b"\r 30%\nplain", b" text"):
        append(path, data)
        heard += [*reader.lines(), reader.rewritten]
    assert heard == [None, "no bar yet", None, " 10%", " 20", " 20%", " 30%", " 30%", None, None]


def test_a_line_that_ends_in_a_carriage_return_and_a_line_feed_is_not_rewritten(path: Path) -> None:
    reader = LineReader(path)
    append(path, b"half of an end\r")
    assert (list(reader.lines()), reader.rewritten) == ([], None)
    append(path, b"\nnext")
    assert (list(reader.lines()), reader.rewritten) == (["half of an end"], None)


def test_what_a_rewritten_line_leaves_in_memory_is_bounded(path: Path) -> None:
    reader = LineReader(path)
    for _ in range(100):
        append(path, b"progress\r" * 100)
        list(reader.lines())
    assert len(reader._partial) < 100


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(script=Path("train.py"), arguments=("--rate", "0.1 x"), workers=2, logs=tmp_path / "logs")


def test_every_rank_has_a_log_with_a_header_and_timed_lines(tmp_path: Path, job: Job) -> None:
    files, shown = RunFiles(tmp_path), []
    logs = [WorkerLog(job, rank, files, lambda rank, line: shown.append((rank, line))) for rank in (0, 1)]
    for log in logs:
        log.begin(0)
    write_json(files.started(1, 0), {"pid": 4711, "host": "here", "moment": 0.0})
    append(files.boot(0, 0), b"early\n")
    append(files.output(1, 0), b"hello\nlast words")
    for log in logs:
        log.look()
    for log in logs:
        log.drain()
    logs[1].note("ValueError: x\nsecond line")
    for log in logs:
        log.close()
    assert shown == [(0, "early"), (1, "hello"), (1, "last words")]
    header, command, *lines = log_path(job.logs, 1).read_text().splitlines()
    assert header.startswith("# rank 1 host here pid 4711 started 19")
    assert command == "# command train.py --rate '0.1 x'"
    assert [line.split(" ", 1)[1] for line in lines] == ["hello", "last words", "ValueError: x", "second line"]
    assert "pid unknown" in log_path(job.logs, 0).read_text()


def test_a_bar_is_shown_while_it_moves_and_logged_once_it_is_complete(tmp_path: Path, job: Job) -> None:
    files, shown = RunFiles(tmp_path), []
    log = WorkerLog(job, 0, files, lambda rank, line: shown.append(line))
    log.begin(0)
    for data in (b"\r 10%", b"", b"\r 20%", b"\r100%\n", b"\x1b[31mred\x1b[0m\n"):
        append(files.output(0, 0), data)
        log.look()
    log.close()
    assert shown == [" 10%\r", " 20%\r", "100%", "\x1b[31mred\x1b[0m"]
    lines = log_path(job.logs, 0).read_text().splitlines()[2:]
    assert [line.split(" ", 1)[1] for line in lines] == ["100%", "\x1b[31mred\x1b[0m"]


def test_requested_stacks_are_logged_and_not_shown(tmp_path: Path, job: Job) -> None:
    files, shown = RunFiles(tmp_path), []
    log = WorkerLog(job, 0, files, lambda rank, line: shown.append(line))
    log.begin(0)
    for data in (b"before\n10 %stacks of rank 0, asked for by SIGUSR1:\nThread 0x1:\n", b"  File x\nend of the "):
        append(files.output(0, 0), data)
        log.look()
    append(files.output(0, 0), b"stacks of rank 0\nafter\nstacks of rank 0, asked for by SIGUSR1:\ncut off")
    log.begin(1)
    append(files.output(0, 1), b"restarted\n")
    log.close()
    assert shown == ["before", "after", "restarted"]
    text = log_path(job.logs, 0).read_text()
    assert all(line in text for line in ("Thread 0x1:", "  File x", "cut off"))


def test_a_restart_loses_no_line_and_begins_with_a_header(tmp_path: Path, job: Job) -> None:
    files, shown = RunFiles(tmp_path), []
    log = WorkerLog(job, 0, files, lambda rank, line: shown.append(line))
    log.begin(0)
    append(files.output(0, 0), b"before\nunfinished")
    log.begin(1)
    append(files.output(0, 1), b"after\n")
    log.look()
    log.close()
    assert shown == ["before", "unfinished", "after"]
    assert "# rank 0 attempt 2 " in log_path(job.logs, 0).read_text()


def test_a_line_without_an_end_is_shown_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "MOST_LINE_BYTES", 10)
    reader = LineReader(path)
    append(path, b"x" * 8)
    assert list(reader.lines()) == []
    append(path, b"y" * 8)
    assert list(reader.lines()) == ["x" * 8 + "y" * 8]
    append(path, b"z\n")
    assert list(reader.lines()) == ["z"]


# -- a full disk ends no print, and what it refused comes once there is room, or is counted ----------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[io.FileIO]:
    with io.FileIO(tmp_path / "log", "w") as opened:
        yield opened


def test_what_a_full_disk_refused_comes_in_order_once_there_is_room(
    tmp_path: Path, file: io.FileIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.TextIOWrapper(PatientFile(file), encoding="utf-8", write_through=True)
    make_room = disk_with_room_for(10, monkeypatch)
    for number in range(5):
        print("line", number, file=text)
    assert len((tmp_path / "log").read_bytes()) <= 10
    make_room()
    print("line 5", file=text)
    assert (tmp_path / "log").read_text().splitlines() == [f"line {number}" for number in range(6)]


def test_a_line_of_a_signal_handler_repeats_no_other(
    tmp_path: Path, file: io.FileIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, write, handled = PatientFile(file), os.write, []

    def interrupted(number: int, data: bytes) -> int:
        written = write(number, data)
        if not handled:
            handled.append(True)
            raw.write(b"handler\n")
        return written

    monkeypatch.setattr(os, "write", interrupted)
    raw.write(b"line\n")
    assert (tmp_path / "log").read_text().splitlines() == ["line", "handler"]


def test_what_is_too_much_is_counted_in_its_place(
    tmp_path: Path, file: io.FileIO, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        PatientFile(io.FileIO(1, "w", closefd=False)).write(b"text")


@needs_root
@pytest.mark.namespaces
def test_on_a_real_full_disk(tmp_path: Path) -> None:
    """The broken twin is a plain file, whose print ends the loop."""
    with mounted(tmp_path, megabytes=1) as disk:
        opened = io.FileIO(disk.folder / "log", "w")
        filler = disk.fill()
        text = io.TextIOWrapper(PatientFile(opened), encoding="utf-8", write_through=True)
        for number in range(1000):
            print("line", number, "x" * 100, file=text)
        with pytest.raises(OSError, match="No space left"):
            opened.write(bytes(2**16))
        filler.unlink()
        opened.truncate(0)  # what the twin may have left
        opened.seek(0)
        print("line 1000", file=text)
        found = (disk.folder / "log").read_text().splitlines()
        opened.close()
    assert found[-1] == "line 1000"
    assert [line.split()[1] for line in found] == [str(number) for number in range(1001 - len(found), 1001)]
    assert len(found) > 900
