from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner, Result
from support.command_line import refusal
from support.processes import SOON_SECONDS, all_end_soon, engine_files_left_open, watched

from gossamer.base import system
from gossamer.cli import launchers
from gossamer.cli.main import gossamer
from gossamer.comm.network import read_network
from gossamer.launcher.job import Serving, Spawn, spawn
from gossamer.plan.emulation import plan

TRAINING = """
import os, sys, time
from gossamer import events
rank = int(os.environ["RANK"])
events.emit(events.Attached(recipe=os.environ["GOSSAMER_RECIPE"], layouts=(), parameters=10,
                            buffer_bytes=0, control_bytes=0, rank=rank, world=2))
for step in range(1, 21):
    events.emit(events.StepEnded(step=step, seconds=0.1, waiting_seconds=0.02, encode_seconds=0, wire_seconds=0,
                                 decode_seconds=0, bytes_sent=40))
    events.emit(events.Logged(step=step, values={"loss": 1 / step + rank}))
events.emit(events.Saved(step=20, directory="kept"))
if "fail" in sys.argv:
    open(f"emitted-{rank}", "w").close()
    while not os.path.exists(f"emitted-{1 - rank}"):
        time.sleep(0.01)  # who fails first ends the other
    raise ValueError("bad data")
events.emit(events.Closed(steps=20, digest="same", residual_bytes=1, bucket_bytes=2))
"""


GOSSAMER = [sys.executable, "-c", "from gossamer.cli.main import main; main()"]


def run(directory: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> Result:
    """`gossamer run` in this process, which has imported already what it needs; its workers are processes."""
    (directory / "train.py").write_text(script)
    ops = ["run", *options, "train.py", *arguments]
    with chdir(directory), engine_files_left_open(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gossamer", *ops])  # which a run that fails says to write again
        return CliRunner().invoke(gossamer, ops)


@pytest.mark.processes
def test_a_run_ends_with_its_record_its_picture_and_a_table(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINING, "--recipe", "Dense()", "--json", "out.json", "--plot", "out.png", "--logs", "logs")
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert record == json.loads((tmp_path / "logs" / "record.json").read_text())
    assert (record["recipe"], record["steps"], record["workers_agree"]) == ("Dense()", 20, True)
    assert record["final"]["loss"] == pytest.approx(0.55)
    assert record["bytes_sent_per_step"]["accounted"] == 40
    assert (tmp_path / "out.png").exists()
    assert "picture                   out.png" in done.stdout
    assert "workers agree             yes" in done.stdout
    assert sorted(os.listdir(tmp_path / "logs")) == ["rank-0.log", "rank-1.log", "record.json", "run.sqlite"]


PRINTS_CONGESTION = """
import os
open("congestion", "w").write(os.environ.get("GOSSAMER_CONGESTION", "none"))
"""


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="not Linux")
def test_workers_receive_the_congestion_control(tmp_path: Path) -> None:
    done = run(tmp_path, PRINTS_CONGESTION, "--workers", "1", "--congestion", "reno", "--logs", "logs")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "congestion").read_text() == "reno"


ATTACHED = """
import gossamer, torch
world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer)
for step in range(3):
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    optimizer.step()
    session.log(loss=loss.item())
"""


@pytest.mark.processes
def test_a_session_that_the_script_left_open_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that torch loads where a user starts it; other tests' workers load less, see eager/."""
    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "train.py").write_text(ATTACHED)
    done = subprocess.run(
        [*GOSSAMER, "run", "--json", "out.json", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["workers"], record["steps"], record["workers_agree"]) == (2, 3, True)
    assert [step for step, _, _ in record["metrics"]["loss"]] == [1, 2, 3]


@pytest.mark.processes
def test_a_run_sends_what_explain_estimates(tmp_path: Path) -> None:
    recipe = "PowerSGD(rank=1)"  # its factors are state, and no residuals
    done = run(tmp_path, ATTACHED, "--workers", "3", "--recipe", recipe, "--json", "out.json")
    assert done.exit_code == 0, done.output
    with chdir(tmp_path):
        options = ["--workers", "3", "--json", "estimate.json"]
        told = CliRunner().invoke(gossamer, ["explain", recipe, *options, "train.py"])
    assert told.exit_code == 0, told.output
    record, estimated = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "estimate.json"))
    # thirds of bytes, added up in another order
    assert record["bytes_sent_per_step"]["accounted"] == pytest.approx(estimated["bytes_sent_per_step"], rel=1e-14)
    assert estimated["bytes_sent_per_step"] > 0
    assert record["memory_bytes"]["residuals"] == estimated["memory_bytes"]["residuals"] > 0


@pytest.mark.processes
def test_a_script_of_horovod_is_pointed_to_the_option_that_runs_it(tmp_path: Path) -> None:
    done = run(tmp_path, "import horovod.torch as hvd")
    assert done.exit_code == 1
    assert "No module named 'horovod" in done.stderr
    assert "write: gossamer run --as-horovod" in done.stderr
    done = run(tmp_path, "import horovod.torch as hvd; hvd.init()", "--as-horovod")
    assert done.exit_code == 0, done.stderr


@pytest.mark.processes
def test_a_failed_run_says_once_why_and_how_to_continue(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINING, "--recipe", "Dense()", "--json", "out.json", arguments=("fail",))
    assert done.exit_code == 1
    assert (done.stdout + done.stderr).count("Traceback") == 1
    assert "failed: ValueError: bad data (exit code 1)" in done.stderr
    assert "A checkpoint of step 20 is in kept." in done.stderr
    assert "gossamer run --recipe 'Dense()' --json out.json train.py fail" in done.stderr
    assert "The other worker was stopped, unless already finished." in done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["ended"], record["steps"], record["checkpoints"][0]["step"]) == ("failed", 20, 20)
    assert "steps                     20 in " in done.stdout


@pytest.mark.processes
def test_a_script_without_attach_is_told_the_missing_line(tmp_path: Path) -> None:
    done = run(tmp_path, "print('hello')")
    assert done.exit_code == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    assert "never called gossamer.attach" in done.stderr
    assert "workers agree" not in done.stdout


WAITING = """
import os, signal, subprocess, sys, time
{}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(100)
"""


@contextmanager
def waiting_run(directory: Path, first: str = "") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two workers with a helper each that wait; the launcher, and the file descriptors of all four."""
    (directory / "train.py").write_text(WAITING.format(first))
    with subprocess.Popen(
        [*GOSSAMER, "run", "train.py"],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline().split() for _ in range(2)]
        opened = [os.pidfd_open(int(pid)) for line in lines for pid in line[-2:]]
        try:
            yield launcher, opened
        finally:
            launcher.kill()


@watched
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "first"),
    [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGINT, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")],
)
def test_a_signal_ends_everyone_soon(tmp_path: Path, number: signal.Signals, first: str) -> None:
    with waiting_run(tmp_path, first) as (launcher, opened):
        launcher.send_signal(number)
        assert all_end_soon(opened)
        _, stderr = launcher.communicate(timeout=SOON_SECONDS)
    assert launcher.returncode == 128 + number
    assert f"Stopped by {number.name}" in stderr
    assert "Traceback" not in stderr


@watched
@pytest.mark.processes
def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with waiting_run(tmp_path) as (launcher, opened):
        launcher.kill()
        assert all_end_soon(opened)


SERVER = """
import os, socket
print("pid", os.getpid(), flush=True)
host, port = os.environ["GOSSAMER_SERVERS"].split(",")[int(os.environ["GOSSAMER_SERVER"])].split(":")
with socket.create_server((host, int(port))) as listener:
    while True:
        listener.accept()[0].close()
"""
# `gossamer`, with a server that is up in no time
BESIDE_A_STAND_IN = """
import sys
from functools import partial
from gossamer.cli import main
from gossamer.cli import launchers
launchers.Serving = partial(launchers.Serving, command=(sys.executable, "-S", "-c", sys.argv.pop(1)))
main.main()
"""


@watched
@pytest.mark.processes
def test_servers_and_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITING.format(""))
    with subprocess.Popen(
        [sys.executable, "-c", BESIDE_A_STAND_IN, SERVER, "run", "--servers", "1", "--workers", "1", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        said = launcher.stdout.readline().split()[-2:] + launcher.stderr.readline().split()[-1:]
        opened = [os.pidfd_open(int(pid)) for pid in said]
        launcher.kill()
        assert all_end_soon(opened)
    assert len(opened) == 3


def run_beside_servers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, script: str, *options: str, server: str = SERVER
) -> tuple[int, str]:
    (directory / "train.py").write_text(script)
    monkeypatch.chdir(directory)
    stand_in = (sys.executable, "-S", "-u", "-c", server)
    monkeypatch.setattr(launchers, "Serving", partial(Serving, command=stand_in, standby=()))
    result = CliRunner().invoke(gossamer, ["run", *options, "train.py"])
    return result.exit_code, str(result.output)


ENDS = """
import os
if os.environ["RANK"] == "1":
    os._exit(7)
"""


@pytest.mark.processes
def test_a_worker_that_ends_with_an_exit_code_ends_all_that_runs_next_to_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--servers", "1", "--workers", "3", "--recipe", "Dense()")
    exit_code, said = run_beside_servers(tmp_path, monkeypatch, ENDS + "import time; time.sleep(100)", *options)
    assert exit_code == 7, said
    assert "rank 1 failed: it ended with exit code 7" in said
    assert "The other 2 workers were stopped, unless already finished." in said


# Rank 0 trains once the launcher knows that rank 1 is no more
DIES = """
import os, signal, time
from pathlib import Path
from gossamer.base.run_files import RunFiles
if os.environ["RANK"] == "1":
    Path("dying").touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not Path("dying").exists():
    time.sleep(0.01)
pid = RunFiles(Path(os.environ["GOSSAMER_RUN_DIRECTORY"])).newest_start(1)["pid"]
while Path(f"/proc/{pid}").exists():
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at a process by /proc")
@pytest.mark.processes
def test_a_run_next_to_servers_outlives_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--servers", "1", "--recipe", "Dense()", "--json", "out.json")
    exit_code, said = run_beside_servers(tmp_path, monkeypatch, DIES + TRAINING, *options)
    assert exit_code == 0, said
    assert said.count("rank 1 was lost (signal SIGKILL). The other one continues.") == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["steps"], record["final"]["loss"]) == (20, pytest.approx(0.05))
    (logs,) = (tmp_path / "runs").iterdir()
    assert sorted(os.listdir(logs)) == ["rank-0.log", "rank-1.log", "record.json", "run.sqlite", "server-0.log"]


@pytest.mark.processes
def test_a_server_that_fails_ends_the_run_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "raise RuntimeError('no such recipe')"
    exit_code, said = run_beside_servers(tmp_path, monkeypatch, "", "--servers", "1", "--logs", "kept", server=failing)
    assert exit_code == 1
    assert said.count("server 0: RuntimeError: no such recipe") == 1
    assert "Server 0 failed at its start (exit code 1)" in said
    assert "no such recipe" in (tmp_path / "kept" / "server-0.log").read_text()


IN_THE_LAB = """
import os, socket
import gossamer
places = [place.split(":") for place in os.environ["GOSSAMER_SERVERS"].split(",")]
for host, port in places:
    while True:
        try:
            with socket.create_connection((host, int(port))) as link:
                print(link.getsockname()[0], "reaches", host)
            break
        except ConnectionRefusedError:
            pass
print("met", gossamer.init().size, "at", os.environ["MASTER_ADDR"])
"""
PLAN = plan(read_network("200mbit", 2))
ENTERS_ITS_HOST = """
import ctypes, os
with open(os.environ["GOSSAMER_NETWORK_NAMESPACE"], "rb") as network:
    assert ctypes.CDLL(None).setns(network.fileno(), 0x40000000) == 0
"""


@pytest.mark.skipif(PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root")
@pytest.mark.namespaces
@pytest.mark.processes
def test_servers_have_hosts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--servers", "2", "--workers", "2", "--network", "200mbit")
    server = ENTERS_ITS_HOST + SERVER
    exit_code, said = run_beside_servers(tmp_path, monkeypatch, IN_THE_LAB, *options, server=server)
    assert exit_code == 0, said
    for rank in (0, 1):
        for server in (2, 3):
            assert f"[rank {rank}] 10.77.0.{rank + 1} reaches 10.77.0.{server + 1}\n" in said
        assert f"[rank {rank}] met 2 at 10.77.0.3\n" in said
    assert "hostname" not in said + capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "is_root", "forks"),
    [
        ([], False, True),
        (["--network", "1gbit"], True, True),
        (["--network", "1gbit"], False, False),
        (["--dry-run"], True, False),
    ],
)
def test_workers_are_forks_unless_the_launcher_starts_none_or_restarts_itself(
    options: list[str], is_root: bool, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    @contextmanager
    def starter(context: Context, *, fork: bool) -> Iterator[Spawn]:
        asked.append(fork)
        yield spawn

    monkeypatch.setattr("gossamer.cli.run.worker_starter", starter)
    monkeypatch.setattr(system, "is_root", lambda: is_root)
    monkeypatch.setattr("gossamer.cli.run_training.run_training", lambda **given: 0)
    assert run(tmp_path, "", *options).exit_code == 0
    assert asked == [forks]


def refused(*arguments: str) -> str:
    return refusal("run", *arguments)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def test_what_cannot_work_is_refused_before_anything_starts(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in refused("missing.py")
    assert "--recipe" in refused("--recipe", "TopZ(", script)
    assert "no directory" in refused("--json", "nowhere/out.json", script)
    assert "it has: " in refused("--interface", "none7", script)
    assert "--rendezvous HOST:PORT" in refused("--nnodes", "2", script)
    assert "in 0..0" in refused("--node-rank", "1", script)
    assert "HOST:PORT" in refused("--rendezvous", "nonsense", script)
    monkeypatch.setattr("gossamer.base.figures.find_spec", lambda name: None)
    assert "gossamer[plot]" in refused("--plot", "out.png", script)
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_file_that_could_not_be_written_is_refused(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert "cannot be written" in refused("--json", str(tmp_path / "out.json"), script)
    assert "cannot be written" not in refused("--json", str(tmp_path / "sub" / "out.json"), script)


def test_logs_that_cannot_be_written_are_refused_with_the_line_to_write(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file where the folder would be")
    for options in ((), ("--logs", "runs/mine")):
        assert "--logs DIRECTORY" in (said := refused(*options, script))
        assert "Usage:" in said


def test_servers_that_cannot_work_are_refused_with_the_line_to_write(script: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"0123456789abcdef" * 2)
    token.chmod(0o644)
    assert f"chmod 600 {token}" in " ".join(refused("--servers", "1", "--token-file", str(token), script).split())
    token.chmod(0o600)
    several = ("--nnodes", "2", "--rendezvous", "localhost:1")
    assert "Leave out --nnodes;" in refused("--servers", "1", *several, script)
    assert "Leave out --rendezvous;" in refused("--servers", "1", *several[2:], script)


@pytest.mark.processes
def test_a_port_in_use_is_said_at_once(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        assert f"Port {port} is in use" in refused("--rendezvous", f"127.0.0.1:{port}", script)
        assert time.monotonic() - began < SOON_SECONDS


def test_help_lists_the_commands() -> None:
    said = CliRunner().invoke(gossamer, ["--help"]).output
    assert all(name in said for name in ("run", "explain", "recipes"))
