"""Ingestion: runs that no launcher fills are read, into a copy where they cannot be written; what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.disks import mounted, needs_root
from support.processes import eventually
from support.watched_runs import KINDS, made

from gossamer.errors import GossamerError
from gossamer.observe.telemetry import Ingest
from gossamer.observe.watch.ingestion import ingesting, writable
from gossamer.observe.watch.runs import WatchedRun


def test_a_run_that_its_launcher_fills_is_left_alone(tmp_path: Path) -> None:
    run = made(tmp_path, KINDS["live"])
    (tmp_path / ".run-0").mkdir()
    (tmp_path / ".run-0" / "launcher.jsonl").touch()
    before = (tmp_path / "run.sqlite").read_bytes()
    said: list[str] = []
    with ingesting([run], said.append):
        pass
    assert (said, (tmp_path / "run.sqlite").read_bytes()) == ([], before)


def test_a_run_without_a_store_gets_one(tmp_path: Path) -> None:
    (tmp_path / "events-0.jsonl").write_text("")
    run = WatchedRun("0", tmp_path)
    with ingesting([run], print):
        pass
    assert (tmp_path / "run.sqlite").exists()


def test_a_store_that_is_none_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"no store" * 999)
    said: list[str] = []
    with ingesting([WatchedRun("0", tmp_path)], said.append):
        pass
    assert len(said) == 1


def events(run: WatchedRun) -> int:
    try:
        with run.reading() as db:
            return int(db.execute("SELECT COUNT(*) FROM event WHERE kind = 'noticed'").fetchone()[0])
    except GossamerError:
        return 0


def tell(folder: Path, count: int) -> None:
    with (folder / "aside-0.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "noticed", "moment": 1.0}) + "\n" for _ in range(count))


def test_a_run_whose_launcher_was_killed_is_read_on(tmp_path: Path) -> None:
    run = made(tmp_path, KINDS["live"])
    had = events(run)
    tell(tmp_path, 3)
    with ingesting([run], pytest.fail):
        assert eventually(lambda: events(run) == had + 3)


@needs_root
@pytest.mark.namespaces
@pytest.mark.parametrize("has_store", [True, False])
def test_a_folder_on_a_read_only_disk_is_read_into_a_copy(tmp_path: Path, has_store: bool) -> None:
    said: list[str] = []
    with mounted(tmp_path, megabytes=4) as disk:
        tell(disk.folder, 3)
        written = Ingest(disk.folder) if has_store else None  # it stays open, as that of a launcher that is elsewhere
        if written is not None:
            written.look()
            disk.read_only_view()
        else:
            disk.read_only()
        run = WatchedRun("0", disk.view)
        if written is None:
            twin: list[str] = []
            with ingesting([run], twin.append):  # without a copy there is nowhere to read it into
                pass
            assert len(twin) == 1
        with writable([run], said.append) as (shown,), ingesting([shown], pytest.fail):
            assert eventually(lambda: events(shown) == 3)
            if written is not None:
                tell(disk.folder, 2)
                assert eventually(lambda: events(shown) == 5)
            copy = shown.store
        assert not copy.exists()
        if written is not None:
            written.close()
    assert len(said) == 1
    assert "is not writable" in said[0]
