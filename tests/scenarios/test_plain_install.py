"""A plain installation: the README's commands without extras, a compiler's work, mpirun, iproute2 or root's tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import nightly
from support.paths import ROOT, TESTS

SCRIPT = """
import torch
import gossamer

world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer) as session:
    for step in range(30):
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
"""
ABSENT = """
from importlib.machinery import PathFinder

absent, find_spec = {"matplotlib", "sklearn", "hypothesis", "pytest", "zmq"}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] in absent else find_spec(name, *where)
"""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain").mkdir()
    eager = "" if request.config.getoption("plain") else (TESTS / "eager" / "sitecustomize.py").read_text()
    (tmp_path / "plain" / "sitecustomize.py").write_text(eager + ABSENT)
    (tmp_path / "bin").mkdir()  # all that PATH names
    return tmp_path


def say(folder: Path, *arguments: str, kernels: bool = True) -> tuple[int, str]:
    """Exit code and words of a command where those packages and programs are missing."""
    paths = [str(folder / "plain"), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": str(folder / "bin")}
    if not kernels:
        environment["GOSSAMER_KERNELS"] = "reference"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout + done.stderr


def gossamer(*arguments: str) -> list[str]:
    return ["-m", "gossamer", *arguments]


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["train.py"], id="alone", marks=pytest.mark.nightly),
        pytest.param(gossamer("explain", "PowerSGD(rank=4)", "train.py"), id="explain", marks=pytest.mark.nightly),
        pytest.param(gossamer("run", "--recipe", "PowerSGD(rank=4)", "train.py"), id="averages"),
        pytest.param(
            gossamer("run", "--recipe", "ParameterServer('async', push=TopK(0.01), pull=Int8())", "train.py"),
            id="servers",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            gossamer("run", "--recipe", "Gossip(mixing='pairwise') + Ring()", "train.py"),
            id="gossip",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_it_works(command: list[str], folder: Path) -> None:
    code, said = say(folder, *command)
    assert code == 0, said
    assert "Traceback" not in said


@pytest.mark.nightly
@pytest.mark.processes
def test_a_comparison_makes_its_page(folder: Path) -> None:
    command = gossamer("compare", "--workers", "2", "--recipe", "Dense()", "--recipe", "home", "--page", "page.html")
    code, said = say(folder, *command, "train.py", kernels=False)
    assert code == 0, said
    assert "<svg" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    "command", [["run", "--workers", "2"], *nightly(["compare", "--recipe", "Dense()"])], ids=" ".join
)
def test_a_picture_is_refused_before_anything_runs(command: list[str], folder: Path) -> None:
    code, said = say(folder, *gossamer(*command, "--plot", "curves.png", "train.py"))
    assert code != 0
    assert "matplotlib" in said
    assert "pip install" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 6, said
    assert not (folder / "runs").exists(), "nothing has run"


def test_what_is_called_absent_is_absent(folder: Path) -> None:
    code, said = say(folder, "-c", "import matplotlib")
    assert code != 0
    assert "No module named 'matplotlib'" in said
