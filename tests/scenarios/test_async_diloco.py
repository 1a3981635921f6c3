"""AsyncDiLoCo in real processes: workers and servers are killed; workers return, and join while the others train."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import engine_files_left_open

from gossamer.cli import launchers
from gossamer.cli.main import gossamer
from gossamer.launcher.job import Serving

SCRIPT = """
import os, signal, time
import torch
import gossamer

torch.manual_seed(0)
world = gossamer.init()
model = torch.nn.Linear(20, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
with gossamer.attach(model, optimizer) as session:
    began = session.steps
    with open(f"began-{world.rank}-{attempt}", "w") as file:
        file.write(str(began))
    while session.steps < 60:
        if world.rank == 1 and attempt == 0 and session.steps == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 0 and session.steps == 59:  # the others have ended, or wait for this one at the end
            while not os.path.exists("began-1-1"):
                time.sleep(0.01)
        torch.manual_seed(100 * session.steps + world.rank)
        loss = model(torch.randn(16, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
    assert began == 0 or 0 < began <= 30, began
"""


@pytest.mark.processes
def test_a_killed_worker_returns_and_the_others_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    recipe = "AsyncDiLoCo(period=5, quorum=3, outer_momentum=0.0, pull=Int8()) + Int8()"  # no overshoot at any timing
    options = ["--workers", "3", "--servers", "1", "--max-restarts", "1", "--json", "out.json", "--recipe", recipe]
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", *options, "train.py"])
    assert done.exit_code == 0, done.output
    found = json.loads(Path("out.json").read_text())
    assert found["workers_agree"] is True, done.output
    assert found["servers"]["late"] == 0
    returned = int(Path("began-1-1").read_text())
    assert found["servers"]["samples"] == 2 * 60 + returned + (60 - returned), "every step that was sent is merged once"
    assert 0 < returned <= 30
    assert found["metrics"]["loss"][-1][2] < 0.5 * found["metrics"]["loss"][0][2]


ELASTIC_SCRIPT = """
import os, signal, time
import torch
import gossamer

torch.manual_seed(0)
world = gossamer.init()
model = torch.nn.Linear(20, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
place, attempt = int(os.environ["GOSSAMER_PLACE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
changes = []

def exists(name):
    while not os.path.exists(name):
        time.sleep(0.01)

with gossamer.attach(model, optimizer) as session:
    session.on_change(changes.append)
    began = session.steps
    with open(f"began-{place}-{attempt}", "w") as file:
        file.write(f"{began} {world.rank} {world.size}")
    while session.steps < 60:
        if place == 1 and attempt == 0 and session.steps == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == 0 and session.steps == 40:
            exists("began-1-1")
            os.kill(int(open("server").read()), signal.SIGKILL)
            os.system(f"{os.environ['COMMAND']} resize {os.environ['LOGS']} 3")
        if place == 0 and session.steps == 59:
            exists("began-2-0")
        torch.manual_seed(100 * session.steps + place)
        loss = model(torch.randn(16, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
with open(f"ended-{place}-{attempt}", "w") as file:
    file.write(f"{sum(len(each.lost) for each in changes)} {sum(each.joined for each in changes)}")
"""
SERVER = """
import os, runpy, sys
with open("server", "w") as file:
    file.write(str(os.getpid()))
sys.argv = [sys.argv[0]]
runpy.run_module("gossamer.train.parameter_server", run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_in_an_elastic_run_workers_and_servers_are_replaced_and_newcomers_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ELASTIC_SCRIPT)
    Path("server.py").write_text(SERVER)
    monkeypatch.setenv("COMMAND", f"{sys.executable} -m gossamer")
    monkeypatch.setenv("LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr(launchers, "Serving", partial(Serving, command=(sys.executable, "-u", "server.py"), standby=()))
    recipe = "AsyncDiLoCo(period=5, quorum=2, outer_momentum=0.0, pull=Int8()) + Int8()"
    options = ["--workers", "2:2", "--servers", "1", "--max-restarts", "1", "--json", "out.json", "--recipe", recipe]
    with engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", *options, "--logs", "logs", "train.py"])
    assert done.exit_code == 0, done.output
    found = json.loads(Path("out.json").read_text())
    assert found["workers_agree"] is True, done.output
    assert "server 0 ended with signal SIGKILL" in done.output
    began = {name: [*map(int, Path(f"began-{name}").read_text().split())] for name in ("0-0", "1-0", "1-1", "2-0")}
    assert began["0-0"][0] <= 30, "0, or as many steps as the other worker had sent before"
    assert began["0-0"][1:] == [0, 2]
    assert 0 < began["1-1"][0] <= 40
    assert began["2-0"][0] >= 30
    assert began["2-0"][2] == 3
    lost, joined = map(int, Path("ended-0-0").read_text().split())
    assert (lost, joined) == (1, 2), "a loss, its replacement and a newcomer"
    assert found["servers"]["late"] == 0
    made = sum(60 - began[name][0] for name in ("0-0", "1-1", "2-0"))  # by the three sessions that ended
    killed = found["servers"]["samples"] - made
    assert 0 < killed <= 30, "steps of the lost worker and of no other one are lost, and none is merged twice"
    assert found["metrics"]["loss"][-1][2] < 0.5 * found["metrics"]["loss"][0][2]
