"""The command `python -m gossamer.horovod`, and a run by it of a Horovod script that is not changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import of_this_checkout

from gossamer.horovod.command import run_here, translated

GIVEN = "-np 4 -H localhost:4 --verbose --gloo --recipe TopK(0.1) --network-interface lo train.py --lr 1 -np 2"
WANTED = "run --as-horovod --workers 4 --recipe TopK(0.1) --interface lo train.py --lr 1 -np 2"


def test_options_become_those_of_gossamer_run_and_the_scripts_own_stay() -> None:
    assert translated(GIVEN.split()) == (WANTED.split(), {})


def test_hosts_name_the_number_of_workers() -> None:
    assert translated(["-H", "localhost:3", "python", "train.py"])[0] == [
        *("run", "--as-horovod", "--workers", "3", "python", "train.py")
    ]
    assert translated(["train.py"])[0] == ["run", "--as-horovod", "train.py"]


def test_settings_become_variables() -> None:
    words = "--timeline-filename t.json --timeline-mark-cycles --fusion-threshold-mb 2 --cycle-time-ms 1.5"
    _, variables = translated([*words.split(), "--start-timeout", "90", "train.py"])
    assert variables == {
        "HOROVOD_TIMELINE": str(Path("t.json").absolute()),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_FUSION_THRESHOLD": str(2 * 2**20),
        "HOROVOD_CYCLE_TIME": "1.5",
        "GOSSAMER_TIMEOUT": "90",
    }


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["-np", "2"], "name the script"),
        (["-np", "2", "--mpi", "train.py"], "no MPI"),
        (["-np", "2", "-H", "one:2,two:2", "train.py"], "--nnodes"),
        (["-np", "2", "--min-np", "1", "train.py"], "--max-restarts"),
        (["--unknown", "train.py"], "unrecognized"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_line_to_write(
    arguments: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        translated(arguments)
    assert about in " ".join(capsys.readouterr().err.split())


def test_within_a_job_the_script_runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path('told').write_text(json.dumps([sys.argv[1:], os.environ['GOSSAMER_RECIPE']]))"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("GOSSAMER_RECIPE", "")
    run_here(["--workers", "2", "--recipe", "Int8()", "python", "-u", str(script), "--workers", "3"])
    assert json.loads(Path("told").read_text()) == [["--workers", "3"], "Int8()"]


def test_a_script_whose_name_begins_like_an_interpreter_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python_train.py").write_text("import pathlib, sys\npathlib.Path('told').write_text(sys.argv[1])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for before in ([], ["/usr/bin/python3.12"]):
        run_here([*before, "python_train.py", f"after {len(before)} words"])
        assert Path("told").read_text() == f"after {len(before)} words"


SCRIPT = """
import torch, horovod.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(6 + hvd.rank()):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
assert hvd.join() == 1
everyone = hvd.allgather(model.weight.detach()[None])
assert torch.equal(everyone[0], everyone[1])
even = hvd.add_process_set([0])
print("RESULT", hvd.rank(), hvd.size(), hvd.local_size(), hvd.allreduce(loss.detach(), name="loss").item() > 0)
hvd.shutdown()
"""


@pytest.mark.processes
def test_a_horovod_script_runs_under_a_recipe_and_its_bytes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gossamer.horovod", "-np", "2", "--recipe", "TopK(0.01)", "--timeline-filename"]
    done = subprocess.run(
        [*command, str(tmp_path / "timeline"), "python", "train.py"],
        cwd=tmp_path,
        env=of_this_checkout(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split("RESULT ")[1] for line in done.stdout.splitlines() if "RESULT" in line) == [
        "0 2 2 True",
        "1 2 2 True",
    ]
    (file,) = tmp_path.glob("runs/*/record.json")
    record = json.loads(file.read_text())
    assert "TopK" in json.dumps(record["recipe"])
    assert "allreduce.loss" in (tmp_path / "timeline").read_text()


ELASTIC = """
import os, signal, torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

@hvd.elastic.run
def train(state):
    print("BEGINS AT", state.batch)
    while state.batch < 6:
        if first_attempt and state.batch == 4 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 3 == 0:
            state.commit()

state = hvd.elastic.TorchState(model, optimizer, batch=0)
train(state)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[1])
print("ENDS AT", state.batch)
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_an_elastic_script_continues_from_its_commit_when_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    command = [sys.executable, "-m", "gossamer", "run", "--as-horovod", "--workers", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, "train.py"],
        cwd=tmp_path,
        env=of_this_checkout(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begins = [line.split("AT ")[1] for line in done.stdout.splitlines() if "BEGINS AT" in line]
    assert begins == ["0", "0", "3", "3"]
    assert done.stdout.count("ENDS AT 6") == 2
