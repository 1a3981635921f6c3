"""The folder of a run's logs belongs to one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command_line import refusal

from gossamer.cli import log_folder
from gossamer.cli.log_folder import LOCK_FILE, private_directory


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sqlite").write_text("of the first run")
    with private_directory(tmp_path) as directory:
        said = refusal("run", "--logs", str(tmp_path), str(tmp_path / "train.py"))
        assert directory.exists()
        assert sorted(os.listdir(tmp_path)) == sorted([LOCK_FILE, directory.name, "run.sqlite", "train.py"])
    assert f"is used by another run (pid {os.getpid()} on" in said
    assert "write --logs DIRECTORY" in said


def test_the_next_run_may_use_the_folder_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    for _ in range(2):
        with private_directory(tmp_path / "logs"):
            pass
        assert os.listdir(tmp_path / "logs") == []


def test_a_folder_is_free_once_its_run_was_killed(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    path = tmp_path / LOCK_FILE
    with subprocess.Popen([sys.executable, "-S", "-c", program, str(path)], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(click.UsageError, match="is used by another run"), private_directory(tmp_path):
            pass
        holder.kill()
    assert path.exists()
    with private_directory(tmp_path):
        pass


def test_a_lock_on_a_file_that_was_removed_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before ends between this one's opening and locking its file."""
    lock = log_folder.system.lock_file
    removed: list[Path] = []

    def ends_first(handle: int) -> None:
        if not removed:
            removed.append(tmp_path / LOCK_FILE)
            removed[0].unlink()
        lock(handle)

    monkeypatch.setattr(log_folder.system, "lock_file", ends_first)
    with private_directory(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"pid {os.getpid()} on ")


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(log_folder.system, "lock_file", refuse)
    with private_directory(tmp_path) as directory:
        assert directory.is_dir()


def test_stacks_and_operations_of_an_earlier_run_are_removed_and_its_logs_stay(tmp_path: Path) -> None:
    kept = {"rank-2.log", "record.json", "trace-2-7-ab.spans", "stacks.txt"}
    for name in (*kept, "stacks-2-77.txt", "flight-2.json"):
        (tmp_path / name).write_text("{}")
    with private_directory(tmp_path) as directory:
        (directory / "flight-0.json").touch()
        assert {path.name for path in tmp_path.iterdir()} == {*kept, LOCK_FILE, directory.name}
        assert (directory / "flight-0.json").exists()
