"""Readers of files that another process wrote refuse a file of 20 GB by its size, and name it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from gossamer.algorithms.recipes.advice_reference import _advised
from gossamer.cli.forecast_file import read_forecast
from gossamer.comm.environment.run_token import check_token_file, read_token
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.launcher.coordinator import RUN_CARD, read_run_card
from gossamer.observe.event_log import read_entries
from gossamer.observe.saved_record import Record
from gossamer.observe.stacks import read_stacks
from gossamer.observe.trace.span_files import read_span_file
from gossamer.plan.advise.advice_file import read_advice
from gossamer.plan.advise.measured_links import _report
from gossamer.plan.rehearse.model_shapes import from_file
from gossamer.train import checkpoint
from gossamer.train.checkpoint import dcp

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "advice": ("a.json", read_advice),
    "advised recipe": ("a.json", _advised),
    "doctor's report": ("a.json", _report),
    "forecast": ("a.json", read_forecast),
    "record": ("record.json", Record.load),
    "run card": (RUN_CARD, lambda path: read_run_card(path.parent)),
    "network": ("net.toml", lambda path: read_network(str(path), 2)),
    "shapes": ("a.json", from_file),
    "spans": ("a.spans", read_span_file),
    "token": ("token", read_token),
    "token of a user": ("token", check_token_file),
    "description of torch's checkpoint": (".metadata", lambda path: dcp.load(path.parent)),
}


def sparse(path: Path) -> Path:
    path.touch(0o600)
    os.truncate(path, 20 * 2**30)
    return path


@pytest.mark.parametrize("kind", READERS)
def test_a_huge_file_is_refused_with_its_name(tmp_path: Path, kind: str) -> None:
    name, read = READERS[kind]
    with pytest.raises((GossamerError, click.ClickException), match=str(tmp_path)):
        read(sparse(tmp_path / name))


def test_a_huge_manifest_is_refused(tmp_path: Path) -> None:
    checkpoint.complete(tmp_path, 1, 0, [checkpoint.stage(tmp_path, 1, 0, ())], {})
    sparse(tmp_path / "step-00000001/rank-0.json")
    with pytest.raises(GossamerError, match=r"rank-0\.json is damaged.*more than 67108864 bytes"):
        checkpoint.read(tmp_path, 1, 0)


def test_only_the_end_of_a_huge_file_of_stacks_is_read(tmp_path: Path) -> None:
    assert len(read_stacks(sparse(tmp_path / "stacks-0-1.txt"))) == 2**22


def test_a_huge_line_of_an_event_log_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.observe.event_log.MOST_LINE_BYTES", 20)
    (tmp_path / "events-0.jsonl").write_bytes(b'{"kind": 1}\n' + b"\0" * 50 + b'\n{"kind": 2}\n')
    assert [entry["kind"] for entry in read_entries(tmp_path / "events-0.jsonl")] == [1, 2]
