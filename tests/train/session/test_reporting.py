"""Who reports a session: rank 0 itself, its launcher, or nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_workers
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer.errors import AttachError
from gossamer.train.session.reporting import log_destinations, record_path, shows_lines

TRAINING = """
import os, sys
import torch, gossamer
world = gossamer.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(session):
    for step in range(1, 61):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        session.log(loss=float(step))
        if step == 50 and world.rank == 1 and "fail" in sys.argv:
            raise ValueError("bad data")
if "block" in sys.argv:
    with gossamer.attach(model, optimizer) as session:
        train(session)
else:
    train(gossamer.attach(model, optimizer))
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOSSAMER_RECORD", "GOSSAMER_QUIET", "GOSSAMER_LOG_TO"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("quiet", "record", "world", "lines"),
    [
        ("", None, 2, True), ("", "r.json", 2, True), ("", False, 2, False), ("1", None, 2, False),
        ("", None, 1, False), ("", "r.json", 1, False), ("0", None, 1, True), ("0", False, 1, False),
    ],
)  # fmt: skip
def test_lines_are_for_worlds_that_were_not_asked_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch, quiet: str, record: Any, world: int, lines: bool
) -> None:
    monkeypatch.setenv("GOSSAMER_QUIET", quiet)
    assert shows_lines(record, world) is lines


def test_the_variable_beats_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_path(None) is record_path(False) is None
    assert record_path("r.json") == Path("r.json").absolute()
    monkeypatch.setenv("GOSSAMER_RECORD", "other.json")
    assert record_path("r.json") == record_path(False) == Path("other.json").absolute()
    monkeypatch.setenv("GOSSAMER_RECORD", "")
    assert record_path("r.json") is None


def attached(record: Any) -> gossamer.Session:
    model = nn.Linear(3, 2)
    return gossamer.attach(model, SGD(model.parameters(), 0.1), record=record)


def test_a_place_that_cannot_be_written_is_refused_at_attach(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AttachError, match=r'Name another place, such as record="record.json"'):
        attached(tmp_path / "file" / "record.json")
    with pytest.raises(AttachError, match=r'record=True names no file.*Write record="record.json"'):
        attached(True)


def test_alone_a_script_that_asks_for_it_is_recorded_and_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with attached(tmp_path / "loss.json") as session:
        assert f"record: {tmp_path / 'loss.json'}" in repr(session)
        session.model(torch.ones(1, 3)).sum().backward()
        session.optimizer.step()
        session.log(loss=1.0)
    assert json.loads((tmp_path / "loss.json").read_text())["final"] == {"loss": 1.0}
    assert capfd.readouterr() == ("", "")


def test_a_session_under_the_launcher_names_the_launcher_s_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_RUN_DIRECTORY", str(tmp_path / "logs" / ".run-x"))
    with attached(None) as session:
        assert f"record: {tmp_path / 'logs' / 'record.json'}" in repr(session)


def asked(directory: Path) -> dict[str, str]:
    return {"GOSSAMER_RECORD": str(directory / "loss.json"), "GOSSAMER_QUIET": ""}


@pytest.mark.processes
@pytest.mark.parametrize("form", ["block", "open"])
def test_without_our_launcher_rank_0_tells_and_records(tmp_path: Path, form: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    first, second = run_workers([str(script), form], 2, extra=asked(tmp_path))
    assert (first.returncode, second.returncode) == (0, 0), first.stdout
    assert first.stdout.count("gossamer: finished after 60 steps") == 1
    assert "gossamer" not in second.stdout
    record = json.loads((tmp_path / "loss.json").read_text())
    assert (record["ended"], record["workers"], len(record["metrics"]["loss"])) == ("finished", 2, 60)


@pytest.mark.processes
def test_where_another_rank_fails_rank_0_has_what_was_logged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    first, _ = run_workers([str(script), "block", "fail"], 2, extra=asked(tmp_path))
    assert "gossamer: failed after" in first.stdout
    record = json.loads((tmp_path / "loss.json").read_text())
    assert (record["ended"], len(record["metrics"]["loss"])) == ("failed", 50)


def test_where_numbers_go_is_the_arguments_or_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(each) for each in log_destinations(["jsonl:a", "jsonl:b"])] == ["jsonl:a", "jsonl:b"]
    assert [str(each) for each in log_destinations("jsonl:a")] == ["jsonl:a"]
    monkeypatch.setenv("GOSSAMER_LOG_TO", "jsonl:c,prometheus:9400")
    assert [str(each) for each in log_destinations(["jsonl:a"])] == ["jsonl:c", "prometheus:9400"]
    monkeypatch.setenv("GOSSAMER_LOG_TO", "")
    assert log_destinations(["jsonl:a"]) == ()


def test_what_is_no_destination_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match="log_to: 'runs' is no place to log to"):
        gossamer.attach(model, SGD(model.parameters(), lr=0.1), log_to=["runs"])
    monkeypatch.setenv("GOSSAMER_LOG_TO", "runs")
    with pytest.raises(AttachError, match="GOSSAMER_LOG_TO: 'runs' is no place to log to"):
        gossamer.attach(model, SGD(model.parameters(), lr=0.1))


def test_an_attached_session_is_exported_until_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with gossamer.attach(model, optimizer, log_to=[f"jsonl:{file}"]) as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        session.log(loss=0.5)
    values = [json.loads(line)["values"] for line in file.read_text().splitlines()]
    assert values[0] == {"gossamer/workers": 1}
    assert values[1]["gossamer/step_seconds"] > 0
    assert values[2] == {"loss": 0.5}
