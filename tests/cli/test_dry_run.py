"""`gossamer run --dry-run`: prints what would be started, and starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command_line import refusal

from gossamer.base import system
from gossamer.cli import run_training
from gossamer.cli.main import gossamer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(run_training, "run_job", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(run_training, "enter", lambda *_: pytest.fail("a namespace was entered"))
    return tmp_path


def planned(*options: str) -> dict[str, list[str]]:
    """The values of each name, in order."""
    done = CliRunner().invoke(gossamer, ["run", "--dry-run", *options, "train.py", "--rate", "1"])
    assert done.exit_code == 0, done.output
    *lines, last = done.stdout.splitlines()
    assert last == "Nothing was started."
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line[:13].strip(), []).append(line[13:])
    return found


def test_a_dry_run_prints_the_plan_and_makes_no_file(folder: Path) -> None:
    plan = planned("--workers", "2", "--recipe", "TopK(0.01)", "--json", "out.json", "--max-restarts", "3")
    assert plan["command"] == [f"{sys.executable} -u -m gossamer.cli.worker train.py --rate 1"]
    assert plan["workers"] == ["2 on this machine, ranks 0, 1 of 2"]
    assert plan["restarts"] == ["at most 3"]
    assert plan["recipe"][0].startswith("TopK(0.01), which is EveryStep() + Route(Feedback(TopK(density=0.01)))")
    assert "GOSSAMER_RECIPE='TopK(0.01)'" in plan["environment"]
    assert f"OMP_NUM_THREADS={max(1, system.cores() // 2)}" in plan["environment"]
    assert plan["files"][0].startswith("runs/")
    assert "out.json" in plan[""]
    assert os.listdir(folder) == ["train.py"]


@pytest.mark.usefixtures("folder")
def test_machines_servers_networks_and_elastic_workers_are_in_the_plan() -> None:
    second = planned("--workers", "1", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "first:29617")
    assert second["workers"] == ["1 on this machine, rank 1 of 2"]
    assert second["hosts"][0].endswith("machine 1 of 2, rendezvous at first:29617")
    assert second["encryption"] == ["of all connections between workers"]
    served = planned("--servers", "2", "--logs", "here")
    assert served["servers"] == [f"2: {sys.executable} -u -m gossamer.train.parameter_server"]
    assert served["files"] == ["here: rank-0.log, rank-1.log, server-0.log, server-1.log, record.json, run.sqlite"]
    elastic = planned("--workers", "2:4:3", "--network", "100mbit", "--fault", "kill(1, at=3)")
    assert elastic["workers"] == ["3 on this machine at first, 2:4 in the elastic run"]
    assert (elastic["network"][0].split(",")[0], elastic["fault"]) == ("100mbit", ["kill(1, at=3)"])
    assert "the coordinator at 127.0.0.1, port chosen at the start" in elastic["hosts"][0]
    assert planned("--recipe", "auto")["recipe"] == ["auto: chosen while training"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("host", "options", "encrypts"),
    [
        ("203.0.113.1", (), True),
        ("10.0.0.1", (), True),
        ("name.invalid", (), True),
        ("localhost", (), False),
        ("10.0.0.1", ("--plaintext",), False),
        ("10.0.0.1", ("--private-network", "10.0.0.0/8"), False),
        ("203.0.113.1", ("--private-network", "10.0.0.0/8"), True),
    ],
)
def test_workers_of_several_machines_encrypt_unless_all_addresses_are_of_a_named_network(
    host: str, options: tuple[str, ...], encrypts: bool
) -> None:
    plan = planned("--nnodes", "2", "--node-rank", "1", "--rendezvous", f"{host}:29617", *options)
    assert ("encryption" in plan) is encrypts


@pytest.mark.usefixtures("folder")
def test_a_dry_run_refuses_what_a_run_refuses() -> None:
    assert "TopK(density=0.01)" in refusal("run", "--dry-run", "--recipe", "TopK(3)", "train.py")
    assert "--max-restarts" in refusal("run", "--dry-run", "--max-restarts", "-1", "train.py")
