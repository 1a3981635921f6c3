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
    assert 0 <= began <= 30, began
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
    assert 0 <= returned <= 30, "what it had sent before it was killed"
    assert found["metrics"]["loss"][-1][2] < 0.5 * found["metrics"]["loss"][0][2]


ELASTIC_SCRIPT = """
import json, os, signal, time
import torch
import gossamer
from gossamer.cli.main import gossamer as command_line

torch.manual_seed(0)
world = gossamer.init()
model = torch.nn.Linear(20, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
place, attempt = int(os.environ["GOSSAMER_PLACE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
changes, resized = [], False

def note(name, **facts):
    with open(f"{name}-{place}-{attempt}", "w") as file:
        json.dump(facts, file)

def wait_for(name):
    ends = time.monotonic() + 200.0
    while not os.path.exists(name):
        if time.monotonic() > ends:
            raise TimeoutError(f"no {name}: see the logs of the other workers")
        time.sleep(0.01)

with gossamer.attach(model, optimizer) as session:
    session.on_change(changes.append)
    began = session.steps
    note("began", steps=began, size=world.size, member=int(os.environ["GOSSAMER_MEMBER"]))
    while session.steps < 60:
        if place == 1 and attempt == 0 and session.steps >= 30:  # the others may have made more before it attached
            os.kill(os.getpid(), signal.SIGKILL)
        if place == 0 and session.steps >= 40 and not resized:
            os.kill(int(open("server").read()), signal.SIGKILL)
            command_line(["resize", os.environ["LOGS"], "3"], standalone_mode=False)
            resized = True
        if session.steps == 50:  # no worker ends before all have begun
            wait_for("began-1-1")
            wait_for("began-2-0")
        torch.manual_seed(100 * session.steps + place)
        loss = model(torch.randn(16, 20)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
note("ended", lost=sum(len(each.lost) for each in changes), joined=sum(each.joined for each in changes))
"""
SERVER = """
import json, os, runpy, sys
from gossamer.train.parameter_server.shard import ServerShard

take = ServerShard.take

def noted(shard, stamp, version, about, payload):  # a restarted server takes the contributions of its journal again
    take(shard, stamp, version, about, payload)
    with open("taken", "a") as file:
        file.write(json.dumps([stamp.worker, stamp.step, json.loads(about)["weight"]]) + "\\n")

ServerShard.take = noted
with open("server", "w") as file:
    file.write(str(os.getpid()))
sys.argv = [sys.argv[0]]
runpy.run_module("gossamer.train.parameter_server", run_name="__main__")
"""


@pytest.mark.processes
def test_in_an_elastic_run_workers_and_servers_are_replaced_and_newcomers_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ELASTIC_SCRIPT)
    Path("server.py").write_text(SERVER)
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
    began = {name: json.loads(Path(f"began-{name}").read_text()) for name in ("0-0", "1-0", "1-1", "2-0")}
    assert began["0-0"]["size"] == began["1-0"]["size"] == 2
    assert all(each["steps"] <= 50 for each in began.values()), "at most as many as a present worker had sent"
    assert json.loads(Path("ended-0-0").read_text()) == {"lost": 1, "joined": 2}, (
        "the loss, the replacement, a newcomer"
    )
    taken = {(member, step): weight for member, step, weight in map(json.loads, Path("taken").read_text().splitlines())}
    sent = {name: sum(taken[key] for key in taken if key[0] == each["member"]) for name, each in began.items()}
    for name in ("0-0", "1-1", "2-0"):
        assert sent[name] == 60 - began[name]["steps"], "every step of a session that ended was sent"
    assert 0 <= sent["1-0"] <= max(30 - began["1-0"]["steps"], 0), "what the killed worker sent before its end"
    assert found["servers"]["samples"] == sum(sent.values()), "every step that was sent is merged once"
    assert found["servers"]["late"] == 0
    assert found["metrics"]["loss"][-1][2] < 0.1, "0.35 before the first step"
