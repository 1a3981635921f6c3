from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import refusal
from support.nightly import nightly
from support.processes import eventually
from support.testbed_traffic import inhabitants, left_by

from gossamer.base.run_files import RunFiles, write_json
from gossamer.cli import emulation
from gossamer.cli.emulation import Emulation, RunFaultTarget, emulate, enter, schedule
from gossamer.comm.network import read_network
from gossamer.launcher.job import Job
from gossamer.plan.emulation import EmulatedNetwork, EmulationPlan, plan, read_fault
from gossamer.plan.emulation.namespaces import EmulationError

NETWORK = read_network("200mbit,2ms", 2)
PLAN = plan(NETWORK)
needs_lab = pytest.mark.skipif(
    PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root"
)
GOSSAMER = [sys.executable, "-m", "gossamer"]

TRAINING = """
import os, sys
import gossamer, torch
world = gossamer.init()
torch.manual_seed(world.rank)
model = torch.nn.Linear(512, 1024)
session = gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 512)).square().mean()
    loss.backward()
    session.optimizer.step()
    session.log(loss=loss.item())
    if step == 2:
        print("trains", os.environ["MASTER_ADDR"], flush=True)
"""


def command(directory: Path, steps: int, *options: str) -> list[str]:
    (directory / "train.py").write_text(TRAINING)
    return [*GOSSAMER, "run", *options, "train.py", str(steps)]


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
@pytest.mark.parametrize(("spec", "name"), [("200mbit,2ms", "switch"), *nightly(("200mbit", "kernel"))])
def test_the_record_of_a_run_on_an_emulated_network(tmp_path: Path, spec: str, name: str) -> None:
    ran = subprocess.run(
        command(tmp_path, 12, "--network", spec, "--fault", "stop(1, at=0, for_seconds=0.2)", "--json", "out.json"),
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["network"], record["emulation"], record["lab"]["mtu"]) == (spec, name, 1500)
    if name == "kernel":
        assert record["lab"]["cpu_share"] is None
    else:
        assert 0 < record["lab"]["cpu_share"] < 1
    sent = record["bytes_sent_per_step"]
    assert 1.0 < sent["interface"] / sent["accounted"] < 1.05  # headers of TCP and IP, acknowledgements
    # 2 (n-1)/n of 2.1 MB at 200 Mbit/s: no faster than the line
    assert record["seconds_per_step"]["median"] > 0.95 * sent["accounted"] * 8 / 200e6
    assert "trains 10.77.0.1" in ran.stdout
    assert "stop(1, at=0, for_seconds=0.2) ends" in ran.stderr
    assert "hostname" not in ran.stdout + ran.stderr
    assert record["workers_agree"] is True


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
def test_a_killed_run_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, 100_000, "--network", "200mbit,2ms"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert "trains" in run.stdout.readline()
        run.kill()
    names = left_by(run.pid)
    assert len(names) == 3
    assert eventually(lambda: not inhabitants(names))
    with EmulatedNetwork(NETWORK):
        assert left_by(run.pid) == []


def refused(directory: Path, *options: str) -> str:
    (directory / "train.py").touch()
    return refusal("run", *options, str(directory / "train.py"))


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "such as 20mbit" in refused(tmp_path, "--network", "fast")
    assert "positive number" in refused(tmp_path, "--network", "0mbit")
    assert "one of cut" in refused(tmp_path, "--fault", "explode(1, at=2)")
    assert "there is no 2" in refused(tmp_path, "--fault", "kill(2, at=2)")
    assert "Add --network" in refused(tmp_path, "--fault", "cut(1, at=2)")
    assert "leave out --nnodes" in refused(tmp_path, "--network", "1mbit", "--nnodes", "2", "--rendezvous", "a:1")
    (tmp_path / "one.toml").write_text('[[hosts]]\nrate = "1gbit"\n')
    assert "has 1 hosts, but 2 workers" in refused(tmp_path, "--network", "one.toml")
    assert sorted(os.listdir(tmp_path)) == ["one.toml", "train.py"]


def test_a_user_begins_again_inside_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(emulation.REENTERED, raising=False)
    monkeypatch.setattr(emulation, "plan", lambda network, relays: EmulationPlan(emulation="switch", reenters=True))
    monkeypatch.setattr(sys, "argv", ["gossamer", "run", "a b.py"])

    def execute(program: str, ops: list[str]) -> None:
        raise InterruptedError(program, ops)

    monkeypatch.setattr(os, "execvp", execute)
    with pytest.raises(InterruptedError) as begun:
        enter(NETWORK, ())
    program, ops = begun.value.args
    assert (program, ops[:2], ops[-5:]) == (
        "unshare",
        ["unshare", "--user"],
        [sys.executable, "-m", "gossamer", "run", "a b.py"],
    )
    with pytest.raises(EmulationError, match="Run as root"):
        enter(NETWORK, ())
    assert enter(None, ()) is None


def test_words_are_paced_where_nothing_can_be_emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned = EmulationPlan(emulation="paced", reason="there is no tun")
    monkeypatch.setattr(emulation, "plan", lambda network, relays: planned)
    with pytest.raises(EmulationError, match="no hosts either"):
        enter(NETWORK, [read_fault("slow(1, factor=2, at=1)", 2)])
    assert enter(NETWORK, [read_fault("kill(1, at=1)", 2)]) == planned
    notes: list[str] = []
    with emulate(NETWORK, planned, notes.append) as paced:
        job = paced.place(Job(script=Path("train.py"), logs=tmp_path))
        assert job.settings == {"GOSSAMER_PACED": "200mbit,2ms"}
        assert (job.hosts, job.interface) == ((), None)
        assert paced.record() == {"network": "200mbit,2ms", "emulation": "paced"}
    assert len(notes) == 1
    assert "only approximated on this machine: there is no tun" in notes[0]


def test_the_run_relays_on_the_first_host_only(tmp_path: Path) -> None:
    file = tmp_path / "homes.toml"
    home, office = (
        '[[hosts]]\nsite = "home"\ncount = 2\nrate = "20mbit"\n',
        '[[hosts]]\nsite = "office"\nrate = "1gbit"\n',
    )
    relay = '[[relays]]\nbetween = ["home"]\nthrough = "office"\n'
    file.write_text(home + office + relay)
    with pytest.raises(EmulationError, match="List that host first"):
        enter(read_network(str(file), 3), (), relays=True)


def test_without_a_network_nothing_changes(tmp_path: Path) -> None:
    job = Job(script=Path("train.py"), logs=tmp_path)
    with emulate(None, None, print) as nothing:
        assert nothing.place(job) == job
        assert nothing.record() == {"network": None, "emulation": None}


def test_time_begins_with_training() -> None:
    run = Emulation()
    assert run.training_seconds(False) is None
    first = run.training_seconds(True)
    second = run.training_seconds(False)
    assert first is not None
    assert second is not None
    assert 0 <= first <= second < 5


@contextmanager
def worker(files: RunFiles, rank: int, attempt: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process group that has said it is this rank's worker."""
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        write_json(files.started(rank, attempt), {"pid": process.pid})
        try:
            yield process
        finally:
            process.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_faults_happen_to_the_newest_worker_of_a_rank(tmp_path: Path) -> None:
    files, said = RunFiles(tmp_path), list[str]()
    faults = [read_fault(text, 2) for text in ("stop(1, at=1, for_seconds=1)", "kill(1, at=3)", "kill(0, at=3)")]
    coming = schedule(faults, Emulation(), tmp_path, said.append)
    with worker(files, 1, 0) as before, worker(files, 1, 10) as newest:
        coming.tick(1)
        assert eventually(lambda: state(newest.pid) in "T")
        coming.tick(2)
        assert eventually(lambda: state(newest.pid) in "SR")
        coming.tick(3)  # nobody is rank 0 yet
        assert newest.wait(30) == -signal.SIGKILL
        assert state(before.pid) in "SR"
        RunFaultTarget(None, tmp_path).kill(1)  # ended already
    assert len(said) == 4
