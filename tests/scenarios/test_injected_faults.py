"""Processes that are killed and stopped while they train with a parameter server: the others go on, nothing counts
twice, nobody is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gossamer.cli.main import gossamer
from gossamer.launcher import process
from gossamer.train.synchronizers.peer_endpoints import DEAD_AFTER_SECONDS

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at processes by /proc (Linux)"),
]

# Every gradient is 1 and so is the learning rate: a weight that began at 0 is minus the number of its steps, exactly
TRAINING = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import gossamer
from gossamer.base.run_files import RunFiles

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
files = RunFiles(Path(os.environ["GOSSAMER_RUN_DIRECTORY"]))
SERVER = int(os.environ["WORLD_SIZE"])

def send(number, who):
    os.kill(files.newest_start(who)["pid"], number)

def tell(name, *what):
    with open(name, "a") as file:
        print(*what, file=file)

def spare_is_ready():
    "Whether it has stood still for a while, waiting for its orders."
    def look():
        for process in Path("/proc").glob("[0-9]*"):
            try:
                about = (process / "stat").read_text().rpartition(")")[2].split()
                if about[1] == os.environ["GOSSAMER_LAUNCHER_PID"] and b"--spare" in (process / "cmdline").read_bytes():
                    return about[0], about[11:13]
            except OSError:
                pass
    seen = [look()]
    while len(seen) < 15:
        time.sleep(0.05)
        seen.append(look())
        if seen[-1] is None or seen[-1] != seen[0] or seen[-1][0] != "S":
            seen = seen[-1:]

gossamer.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1000.0 * (rank + 2 * attempt))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
session = gossamer.attach(model, optimizer)
tell("weights", rank, attempt, model.weight.item())

def step():
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(f"steps-{rank}", time.monotonic())

def fault(what):
    "What happens between this step and the next, for those that are left."
    tell("faults", what, len(open("steps-1").readlines()))

"""
IN_ROUNDS = """
for number in range(30):
    if rank == 1 and number == 5:
        fault("stop")
        send(signal.SIGSTOP, 0)
        threading.Timer(2.5, send, (signal.SIGCONT, 0)).start()
    if rank == 1 and number == 10:
        spare_is_ready()
        tell("servers", os.environ["GOSSAMER_SERVERS"])
        step()
        fault("server")
        send(signal.SIGKILL, SERVER)
    elif rank == 0 and number == 20:
        send(signal.SIGKILL, 0)
    elif rank == 1 and number == 20:
        fault("death")
        step()
    else:
        step()
tell("weights", rank, "end", model.weight.item())
"""
ON_ARRIVAL = """
for number in range(10):
    step()
if rank == 0:
    with session.averaged_parameters(model):  # nothing is under way
        tell("merged")
    if attempt == 0:
        while not os.path.exists("steps-1") or len(open("steps-1").readlines()) < 10:
            time.sleep(0.01)
        fault("death")
        send(signal.SIGKILL, 0)
    tell("back")
while rank == 1 and not os.path.exists("back"):
    step()
    time.sleep(0.02)
session.close()
tell("weights", rank, "end", model.weight.item())
"""


@dataclass(frozen=True)
class Seen:
    """What a run left. steps: when each was made, by rank; faults: after how many steps of rank 1; begun: the weight at
    attach, by rank and attempt; ended: at the end."""

    record: dict[str, Any]
    said: str
    steps: dict[int, list[float]]
    faults: dict[str, int]
    begun: dict[tuple[int, int], float]
    ended: dict[int, float]

    def delayed(self, fault: str, seconds: float) -> Seen:
        """The same, if those that were left had needed so much longer."""
        number = self.faults[fault]
        later = [*self.steps[1][:number], *(moment + seconds for moment in self.steps[1][number:])]
        return replace(self, steps={**self.steps, 1: later})

    def gap_seconds(self, fault: str) -> float:
        """From the last step before a fault to the end of the first that had to do with it."""
        number = self.faults[fault]
        return max(after - before for before, after in pairwise(self.steps[1][number - 1 : number + 2]))


def table(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def run(directory: Path, script: str, *options: str) -> Seen:
    (directory / "train.py").write_text(TRAINING + script)
    done = CliRunner().invoke(
        gossamer, ["run", "--workers", "2", "--servers", "1", "--json", "out.json", *options, "train.py"]
    )
    assert done.exit_code == 0, done.output
    weights = table(directory / "weights")
    return Seen(
        record=json.loads((directory / "out.json").read_text()),
        said=done.output,
        steps={rank: [float(line) for line in (directory / f"steps-{rank}").read_text().split()] for rank in range(2)},
        faults={fault: int(number) for fault, number in table(directory / "faults")},
        begun={(int(rank), int(when)): float(value) for rank, when, value in weights if when != "end"},
        ended={int(rank): float(value) for rank, when, value in weights if when == "end"},
    )


def check_nothing_counted_twice(seen: Seen, steps: int) -> None:
    """Every step that a worker made was applied, once. steps: of the weight."""
    made = sum(map(len, seen.steps.values()))
    told = seen.record["servers"]
    assert (told["applied"], told["late"]) == (made, 0)
    assert seen.ended
    assert all(weight == -steps for weight in seen.ended.values())
    assert seen.record["workers_agree"] is True


def check_nobody_is_left(directory: Path) -> None:
    mark = b"GOSSAMER_RUN_DIRECTORY=%s" % bytes(directory.resolve())
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert mark not in environment.read_bytes(), f"{environment.parent} outlived its run"
        except OSError:  # ended meanwhile, or somebody else's
            continue


def test_the_check_of_who_is_left_notices_them(tmp_path: Path) -> None:
    surroundings = {**os.environ, "GOSSAMER_RUN_DIRECTORY": str(tmp_path / "logs" / ".run-1")}
    with subprocess.Popen(["sleep", "60"], env=surroundings) as orphan:
        while b"GOSSAMER_RUN_DIRECTORY" not in Path(f"/proc/{orphan.pid}/environ").read_bytes():
            pass  # Popen returns a moment before the kernel shows the new program's environment
        with pytest.raises(AssertionError, match="outlived its run"):
            check_nobody_is_left(tmp_path)
        orphan.kill()
    check_nobody_is_left(tmp_path)


def check_rounds(seen: Seen) -> None:
    """A worker that stood still for half a detection was waited for, a server for a moment, a dead worker for D.

    Each with seconds to spare, on a busy machine, and never twice D.
    """
    assert 2.3 < seen.gap_seconds("stop") < DEAD_AFTER_SECONDS
    assert seen.gap_seconds("server") < DEAD_AFTER_SECONDS
    assert seen.said.count("server 0 ended with signal SIGKILL. Restarting it") == 1
    assert seen.gap_seconds("death") < 1.8 * DEAD_AFTER_SECONDS
    assert (len(seen.steps[0]), len(seen.steps[1])) == (20, 30)
    assert seen.record["lost"] == [0]
    assert seen.said.count("rank 0 was lost") == 1
    check_nothing_counted_twice(seen, 30)


def check_arrival(seen: Seen) -> None:
    """Nobody waited for the dead worker, and it came back to what the others had made of its parameters."""
    assert seen.gap_seconds("death") < DEAD_AFTER_SECONDS
    assert -len(seen.steps[1]) - 20 < seen.begun[0, 1] <= -20
    assert len(seen.steps[0]) == 20
    assert seen.record["lost"] == []
    assert "Restarting it alone (1 of at most 1)" in seen.said
    check_nothing_counted_twice(seen, sum(map(len, seen.steps.values())))


@pytest.mark.nightly  # in virtual time: train/parameter_server/test_faults.py
@pytest.mark.measures
def test_in_rounds_whoever_stops_is_waited_for_and_who_dies_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = run(tmp_path, IN_ROUNDS, "--recipe", 'ParameterServer("sync")')
    check_rounds(seen)
    for fault in seen.faults:
        with pytest.raises(AssertionError):
            check_rounds(seen.delayed(fault, DEAD_AFTER_SECONDS))
    check_nobody_is_left(tmp_path)
    host, _, port = (tmp_path / "servers").read_text().strip().rpartition(":")
    socket.create_server((host, int(port))).close()  # is free


@pytest.mark.measures
def test_promise_4_on_arrival_nobody_waits_and_who_was_lost_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 600.0)
    seen = run(tmp_path, ON_ARRIVAL, "--max-restarts", "1", "--recipe", "ParameterServer()")
    check_arrival(seen)
    with pytest.raises(AssertionError):
        check_arrival(seen.delayed("death", DEAD_AFTER_SECONDS))
    with pytest.raises(AssertionError):
        check_arrival(replace(seen, begun={(0, 1): 2000.0}))  # its own, fresh
    for broken in (
        replace(seen, ended={0: seen.ended[0] - 1}),
        replace(seen, steps={**seen.steps, 1: seen.steps[1][:-1]}),
    ):
        with pytest.raises(AssertionError):
            check_nothing_counted_twice(broken, -int(seen.ended[0]))
    check_nobody_is_left(tmp_path)
