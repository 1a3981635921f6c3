"""Which folders are runs."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from support.watched_runs import KINDS, made

from gossamer.errors import GossamerError, StoreError
from gossamer.observe.watch.runs import WatchedRun, find_runs


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="there is no run in"):
        find_runs([tmp_path])


def test_without_a_name_it_is_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        made(tmp_path / name, KINDS["finished"])
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "no run").mkdir()
    assert [run.name for run in find_runs((), tmp_path)] == ["new"]


def test_runs_in_folders_of_the_same_name_have_different_names(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("home/a/run", "work/a/run", "work/b/run")]
    for folder in folders:
        made(folder, KINDS["finished"])
    assert [run.name for run in find_runs(folders)] == ["home/a/run", "work/a/run", "work/b/run"]
    assert [run.name for run in find_runs(folders[1:])] == ["a/run", "b/run"]
    assert [run.name for run in find_runs([folders[0], folders[0]])] == ["run", "run"]


def test_without_any_run_it_explains_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="gossamer run --watch"):
        find_runs((), tmp_path)


def test_runs_are_read_only(tmp_path: Path) -> None:
    with made(tmp_path, KINDS["finished"]).reading() as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM log")


def test_a_store_that_is_not_there_yet_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError), WatchedRun("0", tmp_path).reading():
        pass
