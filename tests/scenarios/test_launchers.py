"""Launchers: the same script gives the same bits with none, by the environment, torchrun and mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment, free_port, succeed

# Writes into a file by rank, since launchers may mix what their workers print.
SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gossamer
from gossamer.train.checkpoint import digest

world = gossamer.init()
torch.manual_seed(world.rank)
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with gossamer.attach(model, optimizer, gossamer.TopK(density=0.1)) as session:
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 20)), torch.randint(10, (8,))).backward()
        optimizer.step()
    assert session.steps == 5
ended = f"{world.rank} of {world.size}: {digest(model.parameters())}"
Path(sys.argv[1], f"rank-{world.rank}").write_text(ended)
"""

LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def endings(folder: Path) -> str:
    """What both ranks ended with: the same bits."""
    first, second = ((folder / f"rank-{rank}").read_text() for rank in (0, 1))
    assert first.startswith("0 of 2: ")
    assert second.startswith("1 of 2: ")
    assert first.split()[-1] == second.split()[-1], "the ranks ended with different bits"
    return first.split()[-1]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def expected(script: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits when RANK and WORLD_SIZE are all that is known."""
    folder = tmp_path_factory.mktemp("environment")
    succeed([str(script), str(folder)], 2)
    return endings(folder)


def launch(command: list[str], script: Path, folder: Path) -> str:
    """Run the script with two workers; they learn their place from the launcher alone."""
    environ = {name: value for name, value in environment(0, 2, 0).items() if name not in LAUNCHERS_OWN}
    done = subprocess.run(
        [*command, str(script), str(folder)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return endings(folder)


@pytest.mark.processes
def test_torchrun(script: Path, tmp_path: Path, expected: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    assert launch(command, script, tmp_path) == expected


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpirun(script: Path, tmp_path: Path, expected: str) -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", "-n", "2", *as_root, "--oversubscribe", "--bind-to", "none", sys.executable]
    assert launch(command, script, tmp_path) == expected
