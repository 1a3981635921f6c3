"""Ingestion: only runs without a launcher are read, and what cannot be is said once."""

from __future__ import annotations

from pathlib import Path

from support.watched_runs import KINDS, made

from gossamer.watch.ingestion import ingesting
from gossamer.watch.runs import WatchedRun


def test_a_run_that_its_launcher_fills_is_left_alone(tmp_path: Path) -> None:
    run = made(tmp_path, KINDS["live"])
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


def test_a_store_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"no store" * 999)
    said: list[str] = []
    with ingesting([WatchedRun("0", tmp_path)], said.append):
        pass
    assert len(said) == 1
