"""Remote modules over processes: a script under gossamer run, and an owner that is killed."""

import os
import signal
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
from torch import nn
torch.set_num_threads(1)
import gossamer
from gossamer.errors import PeerLost
from gossamer.train.parallel import remote

world = gossamer.init()
layers = [remote(nn.Linear(4, 4), rank=rank) for rank in (1, 2)]
if world.rank == 0:
    x = torch.ones(2, 4, requires_grad=True)
    layers[1](layers[0](x)).sum().backward()
    print(f"gradient of {tuple(x.grad.shape)}", flush=True)
    sys.stdin.readline()
    try:
        layers[1](torch.ones(2, 4))
    except PeerLost as lost:
        print(f"lost: {lost}", flush=True)
    print(layers[0](torch.ones(2, 4)).shape, flush=True)
"""


@pytest.mark.processes
def test_the_death_of_an_owner_is_told_and_others_serve_on(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py"],
            env={**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert ranks[0].stdout.readline() == "gradient of (2, 4)\n", ranks[0].stderr.read()
        os.kill(ranks[2].pid, signal.SIGKILL)
        said, errors = ranks[0].communicate("go on\n", timeout=300)
        lost, shape = said.splitlines()
        assert "worker 2 has left, or was silent towards worker 0 for 5 s" in lost
        assert shape == "torch.Size([2, 4])"
        assert ranks[0].returncode == 0, errors
        errors = ranks[1].communicate(timeout=300)[1]
        assert ranks[1].returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
